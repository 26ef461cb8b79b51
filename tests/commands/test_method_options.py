"""Settings of the method by themselves: whoever chooses the method, and where."""

from pathlib import Path

import pytest

from safemerge_pl.commands.method_options import put_under_method

SAFE = ["--method", "SafeMerge"]


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ("method: OPCM", ["--alpha", "0.4"], ["--method.alpha", "0.4"]),
        ("method: {class_path: safemerge_pl.OPCM}", ["--alpha=0.4"], ["--method.alpha=0.4"]),
        ("method: OPCM", ["--keep_ratio", "0.3"], ["--keep_ratio", "0.3"]),
        ("pretrained: base", ["--keep_ratio", "0.3"], ["--method.keep_ratio", "0.3"]),
        ("pretrained: base", ["--method.keep_ratio", "0.3"], ["--method.keep_ratio", "0.3"]),
        ("method: OPCM", ["--method", "SafeShare", "--keep_ratio", "0.3"], None),
        ("pretrained: base", ["--dtype", "same"], ["--dtype", "same"]),
        ("method: [broken", ["--dtype", "same"], ["--dtype", "same"]),
    ],
)
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("option", ["--config", "-c"])
def test_a_configuration_chooses_the_method_too(
    config: str, given: list[str], expected: list[str] | None, inline: bool, option: str, tmp_path: Path
) -> None:
    file = tmp_path / "fold.yaml"
    file.write_text(config)
    before = [option, config if inline else str(file)]
    if expected is None:
        expected = ["--method", "SafeShare", "--method.keep_ratio", "0.3"]
    named = SAFE if "method" not in config and expected[0].startswith("--method.") else []
    assert put_under_method([*before, *given], ["dtype"]) == [*named, *before, *expected]


def test_what_a_fold_has_itself_is_no_setting() -> None:
    assert put_under_method(["--seed", "1"], ["seed"]) == ["--seed", "1"]
    assert put_under_method(["--seed", "1"], []) == [*SAFE, "--method.seed", "1"]
    assert put_under_method(["--keep_ratio"], []) == [*SAFE, "--method.keep_ratio"]
