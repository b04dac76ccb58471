from pathlib import Path

import pytest

from inferdbg.cli.settings import load_settings
from inferdbg.engine.errors import UsageError

FLAGS = {
    "serve": {"port": "port", "max-num-seqs": "max_num_seqs", "trace": "trace"},
    "show": {"json": "as_json"},
}


def test_no_file_no_settings(tmp_path: Path) -> None:
    assert load_settings(tmp_path, FLAGS) == {}


def test_a_table_per_verb_with_keys_spelled_like_flags(tmp_path: Path) -> None:
    (tmp_path / "inferdbg.toml").write_text("[serve]\nport = 9000\nmax-num-seqs = 4\ntrace = true\n")
    assert load_settings(tmp_path, FLAGS) == {"serve": {"port": 9000, "max_num_seqs": 4, "trace": True}}
    (tmp_path / "inferdbg.toml").write_text("[show]\njson = true\n[serve]\nmax_num_seqs = 4\n")
    assert load_settings(tmp_path, FLAGS) == {"show": {"as_json": True}, "serve": {"max_num_seqs": 4}}


def test_pyproject_counts_where_there_is_no_file_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.inferdbg.serve]\nport = 1\n[tool.other]\nx = 1\n")
    assert load_settings(tmp_path, FLAGS) == {"serve": {"port": 1}}
    (tmp_path / "inferdbg.toml").write_text("[serve]\nport = 2\n")
    assert load_settings(tmp_path, FLAGS) == {"serve": {"port": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nprot = 1\n", "no flag prot"),
        ("[sreve]\nport = 1\n", "'sreve' is not a verb"),
        ("port = 1\n", "'port' is not a verb"),
        ("[serve\n", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "inferdbg.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(tmp_path, FLAGS)
