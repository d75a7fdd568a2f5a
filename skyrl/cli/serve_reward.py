"""`skyrl serve-reward`: serves a reward model for the environment `reward_model`."""

from __future__ import annotations

import click

from skyrl.cli.extras import require_packages
from skyrl.cli.services import HOST, name_options, port_option, published


@click.command("serve-reward")
@click.argument("model")
@HOST
@port_option(8001)
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Device to compute on."
)
@name_options
def serve_reward(model: str, host: str, port: int, device: str, name: str | None, names: str | None) -> None:
    """Score chats with MODEL, a sequence classifier with one label: a folder, a hub name, or a run of reward models.

    Set environment.skyrl_gym.reward_model.url of a run to the address that is printed. An address that other machines
    can reach is served only with a token, in the variable SKYRL_REWARD_TOKEN, which the run needs, too.
    """
    require_packages("serve-reward", "reward", "starlette", "uvicorn", "torch")
    from skyrl.envs.builtin.reward_model import TOKEN_VARIABLE
    from skyrl.envs.services.reward_service import reward_app
    from skyrl.models.saving.reward_model import RewardModel
    from skyrl.processes.credentials import api_key
    from skyrl.processes.service import listen, serve
    from skyrl.tools.sampling_target import scoring_model

    folder = scoring_model(model)
    token = api_key(TOKEN_VARIABLE)
    with listen(host, port, token, TOKEN_VARIABLE) as bound:
        scorer = RewardModel(folder, device)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound.getsockname()[1]}/score"
        click.echo(f"{model} at {url}")
        with published(name, names, url):
            serve(reward_app(scorer, model, token), bound)
    click.echo("The reward service has stopped.")
