from pathlib import Path

import pytest

from inferdbg.cli.values import parse_buckets, parse_size, parse_slo, read_key_file
from inferdbg.engine.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 2**30), ("500MB", 500_000_000), ("1.5k", 1500), ("4096", 4096), ("2 gi", 2**31)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--kv-memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "1XB", "GB", "1e9", "ib"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-memory takes a size"):
        parse_size("--kv-memory", text)


def test_slo_is_seconds_of_ttft() -> None:
    assert parse_slo("ttft=0.5") == 0.5
    assert parse_slo(" ttft=2 ") == 2.0


@pytest.mark.parametrize("text", ["0.5", "ttft=", "ttft=0", "itl=1", "ttft=1:", "ttft=1:a b", "ttft=-1", "ttft=nan"])
def test_what_is_no_slo(text: str) -> None:
    with pytest.raises(UsageError, match="--slo takes"):
        parse_slo(text)


def test_buckets_are_sorted_and_distinct() -> None:
    assert parse_buckets("8, 1,2,2") == (1, 2, 8)
    assert parse_buckets("") == ()
    for text in ("0", "1,x", "-1", "1.5"):
        with pytest.raises(UsageError):
            parse_buckets(text)


def test_a_key_file_must_be_private_and_hold_a_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-0123456789\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key_file("--api-key-file", path)
    path.chmod(0o600)
    assert read_key_file("--api-key-file", path) == "sk-0123456789"
    path.write_text("short\n")
    with pytest.raises(UsageError, match="at least 8"):
        read_key_file("--api-key-file", path)
    with pytest.raises(UsageError, match="No such file"):
        read_key_file("--api-key-file", tmp_path / "absent")
    assert read_key_file("--api-key-file", None) is None
