from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl.data.data_files import DataFile
from skyrl.data.prompts import load_prompts
from skyrl.data.sources import Columns, read_file, read_rows
from skyrl.errors import DataError

CHAT = [{"role": "user", "content": "hello"}]


class Letters:
    """A tokenizer with one token for each letter of a chat, and of the names in it."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return "".join(message.get("name", "") + message["content"] for message in chat)

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}


LETTERS: Any = Letters()


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def jsonl(folder: Path, text: str) -> str:
    file = folder / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    return str(file)


def prompts_of(source: str, **changes: Any) -> Any:
    return load_prompts([source], LETTERS, **{"env_class": "gsm8k", "max_prompt_length": 100, **changes})


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    row = {"prompt": CHAT, "reward_spec": {"ground_truth": "5"}, "data_source": "math"}
    for source in (parquet(tmp_path, [row]), jsonl(tmp_path, json.dumps(row) + "\n")):
        (prompt,) = prompts_of(source).prompts
        assert prompt.messages == tuple(CHAT)
        assert prompt.token_ids == tuple(map(ord, "hello"))
        assert prompt.data_source == "math"
        assert prompt.extras == {"reward_spec": {"ground_truth": "5"}}
        assert prompt.id == "0:0"


def test_a_row_may_name_its_own_environment(tmp_path: Path) -> None:
    source = jsonl(tmp_path, json.dumps({"prompt": CHAT, "env_class": "other"}) + "\n" + json.dumps({"prompt": CHAT}))
    assert [prompt.env_class for prompt in prompts_of(source).prompts] == ["other", "gsm8k"]


def test_a_row_without_an_environment_is_refused_when_there_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no env_class"):
        prompts_of(jsonl(tmp_path, json.dumps({"prompt": CHAT})), env_class=None)


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 101}]
    dataset = prompts_of(jsonl(tmp_path, json.dumps({"prompt": long}) + "\n" + json.dumps({"prompt": CHAT})))
    assert (len(dataset), dataset.too_long) == (1, 1)


def test_a_row_of_exactly_the_longest_length_is_kept(tmp_path: Path) -> None:
    source = jsonl(tmp_path, json.dumps({"prompt": CHAT}))  # five letters, five tokens
    assert len(prompts_of(source, max_prompt_length=5)) == 1
    with pytest.raises(DataError, match="longer than"):
        prompts_of(source, max_prompt_length=4)


def test_a_dataset_of_which_every_row_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 1 rows .*max_prompt_length = 3"):
        prompts_of(jsonl(tmp_path, json.dumps({"prompt": CHAT})), max_prompt_length=3)


@pytest.mark.parametrize(
    "prompt",
    ["hello", [], None, [{"role": "user"}], [{"role": "user", "content": 5}], ["hello"]],
)
def test_a_broken_prompt_is_named_by_its_row(tmp_path: Path, prompt: Any) -> None:
    source = jsonl(tmp_path, json.dumps({"prompt": CHAT}) + "\n" + json.dumps({"prompt": prompt}))
    with pytest.raises(DataError, match="rows.jsonl, row 1"):
        prompts_of(source)


def test_a_file_without_the_prompt_column_lists_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'prompt'; its columns are question, answer"):
        read_rows(parquet(tmp_path, [{"question": "?", "answer": "!"}]))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no rows"):
        read_rows(jsonl(tmp_path, ""))


def test_an_empty_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], type=pa.list_(pa.string()))}), file)
    with pytest.raises(DataError, match="contains no rows"):
        read_rows(str(file))


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.parquet"
    file.write_text("not parquet", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_rows(str(file))


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows.jsonl:2 is not JSON: Expecting property name .* at column 2;"):
        prompts_of(jsonl(tmp_path, json.dumps({"prompt": CHAT}) + "\n{oops\n"))
    with pytest.raises(DataError, match="rows.jsonl:1 is not JSON: Expecting ',' delimiter at column 14;"):
        prompts_of(jsonl(tmp_path, '{"prompt": []\n'))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data file .*gone.parquet"):
        read_rows(str(tmp_path / "gone.parquet"))


@pytest.mark.parametrize("name", ["x" * 4_000, "a/" * 3_000, "x\0y", "~nobody/x"])
def test_a_name_that_no_file_can_have_is_refused_as_any_other(name: str) -> None:
    with pytest.raises(DataError, match="neither a .parquet"):
        list(read_rows(name))


def test_a_source_that_is_nothing_known_says_what_there_is() -> None:
    with pytest.raises(DataError, match="neither a .parquet"):
        read_rows("data.xml")


def test_questions_and_answers_become_prompts_with_a_ground_truth(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "6 * 12?", "answer": "6 * 12 = 72\n#### 72"},
        {"question": "2?", "answer": 2},
    ]
    columns = Columns(prompt="question", answer="answer")
    for source in (parquet(tmp_path, rows[:1]), jsonl(tmp_path, "\n".join(map(json.dumps, rows)))):
        first, *others = prompts_of(source, columns=columns).prompts
        assert first.messages == ({"role": "user", "content": "6 * 12?"},)
        assert first.extras == {
            "answer": "6 * 12 = 72\n#### 72",
            "reward_spec": {"method": "rule", "ground_truth": "72"},
        }
    assert others[0].extras["reward_spec"]["ground_truth"] == "2"


def test_chats_stand_in_any_column_and_keep_what_else_their_messages_hold(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello", "name": "ann", "tool_calls": None}]
    (prompt,) = prompts_of(parquet(tmp_path, [{"messages": chat}]), columns=Columns(prompt="messages")).prompts
    assert prompt.messages == ({"role": "user", "content": "hello", "name": "ann"},)
    assert prompt.extras == {}


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = jsonl(tmp_path, json.dumps({"question": "?", "level": 1}))
    with pytest.raises(DataError, match="no column 'chat'; its columns are question, level .data.prompt_column"):
        read_rows(source, Columns(prompt="chat"))
    with pytest.raises(DataError, match="no column 'answer'; .*data.answer_column"):
        read_rows(source, Columns(prompt="question", answer="answer"))


@pytest.mark.parametrize("text", ["[{'role': 'user', 'content': 'hi'}]", '[{"role": "user", "content"'])
def test_a_chat_as_text_that_is_no_json_is_not_taken_for_a_question(tmp_path: Path, text: str) -> None:
    source = jsonl(tmp_path, json.dumps({"question": text}))
    with pytest.raises(DataError, match=r"row 0: question is .*begins as a chat and is no JSON"):
        prompts_of(source, columns=Columns(prompt="question"))


def test_a_bad_row_of_several_files_is_named_by_its_file(tmp_path: Path) -> None:
    good, bad = ({"prompt": prompt} for prompt in (CHAT, 3))
    for number, rows in enumerate(([good, good], [good, bad])):
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"part-1\.jsonl, row 1: prompt is 3"):
        prompts_of(str(tmp_path / "part-*.jsonl"))


@pytest.mark.parametrize("form", ["gzip", "zstd"])
def test_compressed_lines_are_the_rows_of_the_file_that_was_compressed(tmp_path: Path, form: str) -> None:
    source = jsonl(tmp_path, "".join(f"{json.dumps({'prompt': CHAT, 'number': number})}\n" for number in range(5000)))
    content, end = Path(source).read_bytes(), {"gzip": "gz", "zstd": "zst"}[form]
    packed = pa.compress(content, form, asbytes=True) if form == "zstd" else gzip.compress(content)
    file = Path(f"{source}.{end}")
    file.write_bytes(packed)
    assert read_rows(str(file)) == read_rows(source)
    assert list(read_file(DataFile(str(file)), start=4990)) == read_rows(source)[4990:]
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"rows\.jsonl\.{end} cannot be read"):
        read_rows(str(file))
    Path(source).write_bytes(packed)
    with pytest.raises(DataError, match=rf"rows\.jsonl is compressed: rename it to .*rows\.jsonl\.{end}"):
        read_rows(source)


def test_a_file_of_another_kind_lists_the_kinds(tmp_path: Path) -> None:
    (tmp_path / "rows.csv.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"rows\.csv\.gz is no file of rows.*\.jsonl\.gz"):
        read_rows(str(tmp_path / "rows.csv.gz"))


BAD = [json.dumps({"prompt": CHAT}), "{oops", json.dumps({"prompt": "text"}), "5", json.dumps({"prompt": CHAT})]


def test_bad_rows_stop_with_the_first_reason_and_their_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:2 is not JSON: .* \(2 more rows are bad\); data.bad_rows = skip"):
        prompts_of(jsonl(tmp_path, "\n".join(BAD)))


def test_bad_rows_can_be_skipped_and_are_counted_with_their_reasons(tmp_path: Path) -> None:
    dataset = prompts_of(jsonl(tmp_path, "\n".join(BAD)), skip_bad_rows=True)
    assert [prompt.id for prompt in dataset.prompts] == ["0:0", "0:4"]
    assert [reason.rpartition("/")[2].split(" ")[0] for reason in dataset.bad_rows] == [
        "rows.jsonl:2",
        "rows.jsonl,",
        "rows.jsonl:4",
    ]


def test_a_prompt_that_the_template_refuses_is_one_bad_row(tmp_path: Path) -> None:
    class Picky(Letters):
        def apply_chat_template(self, chat: list[dict[str, str]], **others: Any) -> str:
            if chat[0]["role"] == "system":
                raise ValueError("no system messages")
            return super().apply_chat_template(chat, **others)

    system_chat = [{"role": "system", "content": "be"}]
    source = jsonl(tmp_path, "\n".join(json.dumps({"prompt": chat}) for chat in (CHAT, system_chat, CHAT)))
    picky: Any = Picky()
    dataset = load_prompts([source], picky, env_class="gsm8k", max_prompt_length=9, skip_bad_rows=True)
    assert [prompt.id for prompt in dataset.prompts] == ["0:0", "0:2"]
    assert dataset.bad_rows[0].endswith("row 1: the chat template refuses a conversation of system: no system messages")


def test_a_source_without_a_prompt_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row of .* is a prompt; the first: .*:1 is not JSON"):
        prompts_of(jsonl(tmp_path, "{oops"), skip_bad_rows=True)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    row = {"prompt": CHAT, "reward_spec": {"ground_truth": "5"}}
    dataset = prompts_of(jsonl(tmp_path, json.dumps(row)))
    assert dataset.fingerprint == prompts_of(parquet(tmp_path, [row])).fingerprint
    row["reward_spec"] = {"ground_truth": "6"}
    assert dataset.fingerprint != prompts_of(jsonl(tmp_path, json.dumps(row))).fingerprint


def test_a_prompt_that_moved_between_sources_is_another_data_set(tmp_path: Path) -> None:
    row = json.dumps({"prompt": CHAT}) + "\n"
    files = []
    for name, count in (("a", 1), ("b", 3), ("c", 2), ("d", 2)):
        (tmp_path / f"{name}.jsonl").write_text(row * count, encoding="utf-8")
        files.append(str(tmp_path / f"{name}.jsonl"))
    one, two = (load_prompts(pair, LETTERS, env_class="gsm8k", max_prompt_length=9) for pair in (files[:2], files[2:]))
    assert one.fingerprint != two.fingerprint
