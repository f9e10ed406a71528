"""Where results are written is checked before the work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayfl import cli
from rayfl.commands import places
from rayfl.errors import ConfigError


def test_a_folder_is_made_and_removed_again_if_it_stays_empty(tmp_path: Path) -> None:
    with places.folder(tmp_path / "new" / "one") as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with places.folder(tmp_path / "new" / "one") as folder:
        (folder / "x").write_text("")
    with pytest.raises(ValueError, match="in the work"), places.folder(folder):
        raise ValueError("in the work")
    assert (folder / "x").is_file()
    (tmp_path / "empty").mkdir()
    with places.folder(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()  # it was there before


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"--out: cannot create .*file: File exists"),
        places.folder(tmp_path / "file"),
    ):
        pass
    with pytest.raises(ConfigError, match=r"--json: cannot create .*file/below"):
        places.file(tmp_path / "file" / "below" / "x.json", "--json")
    with pytest.raises(ConfigError, match=r"--out: .* is a folder; give the name of a file"):
        places.file(tmp_path)
    assert places.file(tmp_path / "pages" / "x.html").parent.is_dir()
    with pytest.raises(ConfigError, match=r"s3://bucket/x is on object storage, to which only runs"):
        places.local(Path("s3://bucket/x"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models", "none", "3"], "--out: s3://bucket/models is on object storage"),
        (["partition", "digits-demo"], "--out: s3://bucket/models is on object storage"),
        (["cluster", "digits-demo"], "--out: s3://bucket/models is on object storage"),
        (["expert", "digits-demo"], "--out: s3://bucket/models is on object storage"),
        (["compare", "one", "two"], "--out: s3://bucket/models is on object storage"),
        (["study", "x.yaml"], "--out: s3://bucket/models is on object storage"),
    ],
)
def test_commands_write_no_folder_that_is_named_like_a_bucket(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rayfl", *arguments, "--out", "s3://bucket/models"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
