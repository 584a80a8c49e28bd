import pytest

from labkit.units import GiB, UserError, parse_size, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GiB), ("8 gib", 8 * GiB), ("8G", 8 * GiB), ("8GB", 8 * 10**9), ("1.5MiB", 3 * 2**19),
        (".5k", 512), ("1024", 1024), (2048, 2048), (2.0**20, 2**20),
    ],
)  # fmt: skip
def test_sizes_that_people_write(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "eight", "8 XB", "-1GiB", "0", 0, -5, float("nan"), float("inf"), True, "1e3", "1e99GiB", None]
)
def test_sizes_that_cannot_be(text):
    with pytest.raises(UserError, match="size"):
        parse_size(text)


def test_what_is_there_is_never_shown_as_zero():
    assert show_bytes(66 * 2**20) == "66.0 MiB"
    assert show_bytes(3 * GiB // 2) == "1.50 GiB"
    assert show_bytes(1) == "1 B"
    assert show_bytes(-2048) == "-2.0 KiB"
    assert show_bytes(None) == "–"


def test_seconds():
    assert [show_seconds(s) for s in (2e-5, 0.0488, 12.06, 125, None)] == ["20.0 µs", "48.8 ms", "12.1 s", "2:05", "–"]
