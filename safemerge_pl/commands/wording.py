"""What a parser complains of, in one sentence with types in words."""

import re
from collections.abc import Iterator

__all__ = ["in_one_sentence", "quote_refusal", "type_in_words"]

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
    "None": "null",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}

_LINES = re.DOTALL | re.MULTILINE

_LONGEST = 300
"""Letters of a complaint of no known form that are shown."""


def in_one_sentence(message: str) -> str:
    r"""Say what a parser's message of many lines comes to.

    Args:
        message: of jsonargparse.

    Example:
        >>> print(in_one_sentence("Parser key \"jobs\":\n  Expected a <class 'int'>. Got value: x"))
        `--jobs` must be a whole number, got 'x'.
        >>> in_one_sentence("the following arguments are required: fit.data, rows")
        'it needs --data, --rows.'
        >>> in_one_sentence("unrecognized arguments: --jbos 3")
        'there is no option --jbos.'
    """
    required = re.match(r"the following arguments are required: (.+)", message)
    if required:
        names = re.sub(r"\b(?:fit|validate|test)\.", "", required[1]).split(", ")
        return f"it needs {', '.join('FOLDER' if name == 'folders' else f'--{name}' for name in names)}."
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if unknown:
        option = unknown[1].partition("=")[0]
        return f"there is no option {option}." if option.startswith("-") else f"'{option}' belongs to no option."
    return _of_key(message, "")


def quote_refusal(message: str) -> str:
    """Give what a class said that refused its settings, out of what a parser says of all types that an option takes.

    Args:
        message: of any error; one that is not of this form is given back as it is.

    Example:
        >>> print(quote_refusal('''Does not validate against any of the Union subtypes
        ... Subtypes: [<class 'NoneType'>, list[lightning.Callback]]
        ... Errors:
        ...   - Expected a <class 'NoneType'>
        ...   - `lr` must be above 0.
        ... Given value type: <class 'list'>
        ... Given value: []'''))
        `lr` must be above 0.
    """
    found = re.match(r"Does not validate against any of the Union.*?^Errors:\n(.+?)^Given value", message, _LINES)
    if found is None:
        return message
    alternatives = [part.replace("\n    ", "\n").strip() for part in re.split(r"^  - ", found[1], flags=re.MULTILINE)]
    told = [part for part in alternatives if part and not re.match(r"Expected an? |Not a valid subclass", part)]
    return quote_refusal(told[0]) if told else message


def _of_key(message: str, above: str) -> str:
    """A complaint about the value of one option, which may lie in another one's."""
    found = re.match(r'(?:Parser|Problem in)?\s*[Kk]ey "([^"]+)":?\s*(.*)', message, re.DOTALL)
    if found is None:
        return f"`--{above}`: {_shortened(message)}" if above else _shortened(message)
    key, rest = f"{above}.{found[1]}" if above else found[1], found[2]
    inner = _told_of_class(rest, key)
    if inner:
        return inner
    name = re.search(r"Expected a dot import path string: ([\w.]+)", rest)
    if name:
        return f"`--{key}`: there is no class {name[1]} of this kind."
    kinds = list(dict.fromkeys(filter(None, map(type_in_words, _expected(rest)))))
    kinds.sort(key="null".__eq__)  # last, whatever order the parser tried them in
    if kinds:
        return f"`--{key}` must be {' or '.join(kinds)}, got {_given(rest)}."
    return f"`--{key}`: {_shortened(rest)}"


def _told_of_class(rest: str, key: str) -> str | None:
    """What the most telling of the classes that were tried says of one of its settings."""
    parts = re.split(r"Problem with given class_path '([\w.]+)':\s+", rest)[1:]
    tried = list(zip(parts[::2], parts[1::2], strict=True))
    for _, told in tried:  # one that knows the option, and only dislikes its value, says the most
        if told.startswith('Parser key "'):
            return _of_key(_dedented(told), key)
    for path, told in tried:
        name = path.rpartition(".")[2]
        missing = re.match(r"the following arguments are required: (.+)", told)
        if missing is not None:
            return f"`--{key}`: {name} needs {', '.join(f'--{key}.{option}' for option in missing[1].split(', '))}."
        option = re.match(r"Option '([\w.]+)' is not accepted", told)
        if option is not None:
            return f"`--{key}`: {name} has no option '{option[1]}'."
    return None


def _dedented(told: str) -> str:
    """A nested complaint, up to where the next alternative of the same value begins."""
    lines = told.splitlines()
    level = re.match(r"\s*", lines[1])[0] if len(lines) > 1 else ""  # type: ignore[index]
    return "\n".join([lines[0], *(line for line in lines[1:] if line.startswith(level))])


def _expected(rest: str) -> Iterator[str]:
    for line in rest.splitlines():
        found = re.search(r"Expected an? (.+?)(?:\. Got value: .*)?$", line)
        if found:
            yield found[1]


def type_in_words(kind: str) -> str:
    """A type as a person would say it; empty for a class, whose name says nothing to the user.

    Example:
        >>> type_in_words("<class 'int'>"), type_in_words("typing.Literal['low', 'high']"), type_in_words("list[str]")
        ('a whole number', 'low or high', 'a list of text')
    """
    choices = re.match(r"(?:typing\.)?Literal\[(.+)\]$", kind)
    if choices:
        return " or ".join(choice.strip(" '\"") for choice in choices[1].split(","))
    plain = re.sub(r"^<class '(.+)'>$", r"\1", kind)
    listed = re.match(r"(?:list|List|Sequence|tuple)\[(.+)\]$", plain)
    if listed:
        inner = type_in_words(listed[1])
        return f"a list of {inner.removeprefix('a ')}{'s' if inner.startswith('a ') else ''}" if inner else "a list"
    return _WORDS.get(plain.partition("[")[0], "")


def _given(rest: str) -> str:
    nested = re.search(r"NestedArg\(key='[^']*', val=(.+)\)\s*$", rest, re.MULTILINE)
    found = nested or re.search(r"(?:Got value|Given value): (.+)", rest)
    value = found[1].strip() if found else "something else"
    return value if nested else repr(value)


def _shortened(message: str) -> str:
    text = " ".join(message.replace("\n  - ", " ").split()).strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
