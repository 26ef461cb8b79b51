"""What a parser complains of is one sentence, and the hint below it one line."""

import pytest

from safemerge_pl.cli import main
from safemerge_pl.commands.wording import in_one_sentence, quote_refusal

FOLD = "fold --pretrained a --incoming b --output c "


@pytest.mark.parametrize(
    ("line", "told", "hint"),
    [
        (FOLD + "--low_memory maybe", "`--low_memory` must be true or false or null, got 'maybe'.", "fold --help"),
        (FOLD + "--dtype int8", "`--dtype` must be same or float32 or bfloat16 or float16, got 'int8'.", "--help"),
        (FOLD + "--method SafeMergee", "`--method`: there is no class SafeMergee of this kind.", "'SafeMerge' by"),
        (FOLD + "--method SafeMerge --method.lr abc", "`--method.lr` must be a number, got 'abc'.", "fold --help"),
        (FOLD + "--method SafeMerge --method.rl 1", "`--method`: SafeMerge has no option 'rl'.", "fold --help"),
        (FOLD + "extra", "'extra' belongs to no option.", "fold --help"),
        (FOLD + "--outptu x", "there is no option --outptu.", "Did you mean '--output' by 'outptu'?"),
        ("fold", "it needs --pretrained, --incoming, --output.", "`safemerge fold --help` lists the options."),
    ],
)
def test_an_error_is_two_lines(line: str, told: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"safemerge: {told}"
    assert hint in second


NESTED = """Parser key "trainer.callbacks":
  Does not validate against any of the Union subtypes
  Subtypes: [list[lightning.Callback], <class 'lightning.Callback'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'safemerge_pl.callbacks.SAFEMergeCallback':
        {inner}
    - Problem with given class_path 'lightning.Callback':
        Option 'keep' is not accepted
    - Expected a <class 'NoneType'>
  Given value type: <class 'jsonargparse._util.NestedArg'>
  Given value: NestedArg(key='keep', val='middle')"""


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (
            "Parser key \"keep\":\n          Expected a typing.Literal['low', 'high']. Got value: middle",
            "`--trainer.callbacks.keep` must be low or high, got 'middle'.",
        ),
        ("Option 'keep' is not accepted", "`--trainer.callbacks`: SAFEMergeCallback has no option 'keep'."),
        (
            "the following arguments are required: monitor, mode",
            "`--trainer.callbacks`: SAFEMergeCallback needs --trainer.callbacks.monitor, --trainer.callbacks.mode.",
        ),
    ],
)
def test_the_class_that_was_meant_is_told_of(inner: str, told: str) -> None:
    assert in_one_sentence(NESTED.format(inner=inner)) == told


REFUSED = """Does not validate against any of the Union subtypes
Subtypes: [<class 'NoneType'>, list[lightning.Callback]]
Errors:
  - Expected a <class 'NoneType'>
  - Does not validate against any of the Union subtypes
    Subtypes: [<class 'lightning.Callback'>, <class 'NoneType'>]
    Errors:
      - Not a valid subclass of Callback
        Subclass types expect one of:
        - a class path (str)
      - {inner}
    Given value type: <class 'str'>
    Given value: a
Given value type: <class 'list'>
Given value: [<object>, Namespace()]"""


@pytest.mark.parametrize("told", ["`lr` must be above 0.", "task 'a' has no model.\ntask 'b' has no model.", "a:\n- b"])
def test_a_class_that_refuses_its_settings_is_quoted(told: str) -> None:
    """Of all types that were tried, and of all that it says."""
    assert quote_refusal(REFUSED.format(inner=told.replace("\n", "\n        "))) == told
    assert quote_refusal(told) == told


def test_where_no_class_says_anything_all_is_shown() -> None:
    inner = REFUSED.format(inner="Expected a <class 'NoneType'>").replace("Does not validate", "Expected a", 2)
    message = inner.replace("Expected a", "Does not validate", 1)
    assert quote_refusal(message) == message


def test_a_message_of_no_known_form_is_shown_cut() -> None:
    assert in_one_sentence("something\n  else") == "something else"
    assert len(in_one_sentence("long " * 200)) < 320


def test_the_whole_message_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SAFEMERGE_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        main([*FOLD.split(), "--low_memory", "maybe"])
    assert "Does not validate against any of the Union subtypes" in capsys.readouterr().err
