"""Configurations that come along, printed to be changed."""

import pytest

from safemerge_pl.cli import main
from safemerge_pl.runtime.configs import config_folder, packaged_configs


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml"])
def test_it_is_printed_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", name])
    assert capsys.readouterr().out == (config_folder() / "tiny.yaml").read_text()


def test_all_are_listed_and_a_wrong_name_gets_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == packaged_configs()
    with pytest.raises(SystemExit, match="1"):
        main(["config", "quickstrat"])
    assert "did you mean 'quickstart.yaml'?" in capsys.readouterr().err
