"""Text documents out of plain, jsonl and gzip files, with the flaws named by file and line."""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

from olmo_jax.errors import UserError

BROKEN_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
SNIFFED_BYTES = 4096
ENCODINGS = {  # the longer marks first: one begins as another does
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""The marks that files in another encoding than UTF-8 begin with."""


class Flaw(NamedTuple):
    """An input that cannot be a document: where it stands and what is wrong with it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Inputs(NamedTuple):
    """The files to read, and those of a folder that are no text."""

    files: list[Path]
    passed_over: list[Flaw]


def find_inputs(
    inputs: Sequence[Path], *, suffixes: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Inputs:
    """List the files to read: named files as they are, folders walked in sorted order.

    In a folder, hidden names and folders called as in `exclude` are left out; with `suffixes` only
    names that end in one of them (or in one and .gz) are taken, else all that look like text.
    Raises: UserError if an input does not exist or is a pipe, or nothing is found.
    """
    found: list[Path] = []
    passed_over: dict[Path, Flaw] = {}
    for path in inputs:
        if not path.is_dir():
            check_file(path)
            found.append(path)
            continue
        for file in search(path, exclude):
            if wanted(file, suffixes):
                found.append(file)
            elif not suffixes:
                passed_over[file] = Flaw(str(file), "no text: a zero byte is in its first 4096")
    if not found:
        rule = f"ends in {' or '.join(suffixes)}" if suffixes else "looks like text"
        names = " ".join(str(path) for path in inputs)
        raise UserError(f"--input {names}: no file {rule}; name other files, or another --suffix")
    return Inputs(list(dict.fromkeys(found)), list(passed_over.values()))


def check_file(path: Path) -> None:
    if not path.exists():
        raise UserError(f"--input {path}: there is no such file or folder; check the path")
    if not path.is_file():
        raise UserError(
            f"--input {path} is a pipe or a device; an input is read twice, to train the "
            "vocabulary and to encode; write it to a file first and name that"
        )


def search(folder: Path, exclude: Sequence[str]) -> list[Path]:
    try:
        return list(walk(folder, exclude))
    except OSError as error:
        raise UserError(
            f"--input {folder} cannot be walked ({error}); make it readable, or name other inputs"
        ) from None


def walk(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Yield a folder's files, the same order on every machine, without hidden ones."""
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        if entry.name.startswith(".") or (entry.name in exclude and entry.is_dir()):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from walk(entry, exclude)
        elif entry.is_file():
            yield entry


def wanted(path: Path, suffixes: Sequence[str]) -> bool:
    if suffixes:
        return path.name.removesuffix(".gz").endswith(tuple(suffixes))
    return looks_like_text(path)


def looks_like_text(path: Path) -> bool:
    """Say whether the first bytes hold no zero; what cannot be read is left to its reader.

    So is text in another encoding, whose mark says that it is text.
    """
    try:
        with open_input(path) as file:
            start = file.read(SNIFFED_BYTES)
            return b"\0" not in start or encoding_of(start) is not None
    except (OSError, *BROKEN_GZIP):
        return True


def open_input(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def encoding_of(start: bytes) -> str | None:
    """Return the encoding that the first bytes of a file name, if it is another than UTF-8."""
    return next((name for mark, name in ENCODINGS.items() if start.startswith(mark)), None)


def read_documents(path: Path) -> Iterator[str | Flaw]:
    """Yield a file's documents, and a flaw in the place of each that cannot be one.

    A .jsonl file is read line by line; any other file is one document and is read whole.
    """
    read = read_lines if path.name.removesuffix(".gz").endswith(".jsonl") else read_text
    try:
        with open_input(path) as file:
            encoding = encoding_of(file.read(4))
            file.seek(0)
            if encoding is None:
                yield from read(file, path)
            else:
                yield Flaw(
                    str(path),
                    f"the file is {encoding}, and text is read as UTF-8 "
                    f"(iconv -f {encoding} -t UTF-8 FILE)",
                )
    except BROKEN_GZIP as error:
        yield Flaw(str(path), f"not a whole gzip file ({error})")
    except OSError as error:
        yield Flaw(str(path), f"cannot be read ({os.strerror(error.errno or 0)})")


def read_text(file: BufferedIOBase, path: Path) -> Iterator[str | Flaw]:
    data = file.read()
    if not data:
        yield Flaw(str(path), "the file is empty")
        return
    if b"\0" in data:
        yield Flaw(str(path), f"no text: byte {data.index(0)} of the file is zero")
        return
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Flaw(f"{path}, line {line}", bad_byte(error, "file"))


def read_lines(file: BufferedIOBase, path: Path) -> Iterator[str | Flaw]:
    number = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            yield parse_line(line, f"{path}, line {number}")
    if number == 0:
        yield Flaw(str(path), "the file is empty")


def parse_line(line: bytes, where: str) -> str | Flaw:
    """Return the text of one JSON line, or what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Flaw(where, bad_byte(error, "line"))
    except json.JSONDecodeError as error:
        return Flaw(where, f"not JSON ({error.msg} at column {error.colno})")
    except ValueError:  # Python's guard against slow conversions
        return Flaw(where, f"an integer of more than {sys.get_int_max_str_digits()} digits")
    except RecursionError:
        return Flaw(where, "lists or objects nested too deeply to be read")
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Flaw(where, 'no string field "text"')
    if not text:
        return Flaw(where, 'the field "text" is empty')
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return Flaw(where, 'the field "text" holds half a surrogate pair, which is no character')
    return text


def bad_byte(error: UnicodeDecodeError, of: str) -> str:
    return f"byte {error.start} of the {of} (0x{error.object[error.start]:02x}) is not UTF-8"
