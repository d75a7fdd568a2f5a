"""`skyrl serve-retriever`: the search service for the environment `search`."""

from __future__ import annotations

from pathlib import Path

import click

from skyrl.cli.extras import require_packages
from skyrl.cli.services import HOST, name_options, port_option, published


@click.command("serve-retriever")
@click.argument("corpus", type=click.Path(path_type=Path))
@HOST
@port_option(8000)
@name_options
def serve_retriever(corpus: Path, host: str, port: int, name: str | None, names: str | None) -> None:
    """Answer searches over CORPUS, a JSONL file with the texts `id` and `contents` in each line, by BM25.

    Set environment.skyrl_gym.search.search_url of a run to the address that is printed. An address that other machines
    can reach is served only with a token, in the variable SKYRL_RETRIEVER_TOKEN, which the run needs, too.
    """
    require_packages("serve-retriever", "search", "bm25s", "starlette", "uvicorn")
    from skyrl.envs.search import TOKEN_VARIABLE
    from skyrl.envs.services.corpus import SearchIndex, read_corpus
    from skyrl.envs.services.retriever import retriever_app
    from skyrl.processes.credentials import api_key
    from skyrl.processes.service import listen, serve

    token = api_key(TOKEN_VARIABLE)
    with listen(host, port, token, TOKEN_VARIABLE) as bound:
        index = SearchIndex(read_corpus(corpus))
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{bound.getsockname()[1]}/retrieve"
        click.echo(f"{len(index)} documents at {url}")
        with published(name, names, url):
            serve(retriever_app(index, token), bound)
    click.echo("The retriever has stopped.")
