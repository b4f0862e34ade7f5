"""Reads pickles that hold plain data only, without the `pickle` module: no name is ever looked up, so no code can run.

Known are the opcodes for None, bool, int, float, str, bytes, tuple, list and dict that protocols 2 to 5 write. Anything that
names a class or function, or calls one, is refused with that name. Nothing is allocated ahead of the bytes that fill it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from memopt.errors import BadFile

Plain = object
"""None, bool, int, float, str, bytes, and tuples, lists and dicts of these."""

_KEYS = (str, int, float, bool, type(None))
_MOST_INT_BYTES = 1024
_NAMED = {
    0x63: "GLOBAL", 0x69: "INST", 0x6F: "OBJ", 0x93: "STACK_GLOBAL", 0x52: "REDUCE", 0x62: "BUILD", 0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x50: "PERSID", 0x51: "BINPERSID",
}  # fmt: skip
_AGAIN = "torch.cuda.memory._dump_snapshot('snapshot.pickle'), to write it again"


def load_plain(data: bytes, name: str) -> Plain:
    """The plain data that `data` pickles; `name` is the file's, for errors. Raises `BadFile` for all else."""
    reader = _Reader(data, name)
    try:
        return reader.run()
    except (LookupError, ValueError, TypeError) as error:
        raise BadFile(
            f"{name} is not a whole pickle",
            why=f"nothing can be read from byte {reader.at} on" if data else "it is empty",
            try_=_AGAIN,
        ) from error


class _Reader:
    """A stack machine over the opcodes; see Lib/pickletools.py for what each one does."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self) -> Plain:
        """The value. A snapshot is millions of opcodes, nearly all of a few kinds: those are done in the loop itself."""
        data, steps, stack, memo, marks = self.data, _STEPS, self.stack, self.memo, self.marks
        at = 0
        while True:
            opcode = data[at]
            if opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[data[at + 1] | data[at + 2] << 8 | data[at + 3] << 16 | data[at + 4] << 24])
                at += 5
            elif opcode == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                at += 1
            elif opcode == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
                at += 1
            elif opcode == 0x8A:  # LONG1
                end = at + 2 + data[at + 1]
                stack.append(int.from_bytes(data[at + 2 : end], "little", signed=True))
                at = end
            elif opcode == 0x4A:  # BININT
                stack.append(int.from_bytes(data[at + 1 : at + 5], "little", signed=True))
                at += 5
            elif opcode == 0x2E:  # STOP
                return self._only_value()
            else:
                self.at = at + 1
                step = steps.get(opcode)
                if step is None:
                    raise self._refused(opcode)
                step(self)
                at = self.at

    def _only_value(self) -> Plain:
        if len(self.stack) != 1 or self.marks:
            raise ValueError(f"{len(self.stack)} values at the end")
        return self.stack[0]

    def _refused(self, opcode: int) -> BadFile:
        if opcode not in _NAMED:
            return BadFile(
                f"{self.name} is not a pickle of plain data",
                why=f"opcode {opcode:#04x} at byte {self.at - 1} is none that plain data needs",
                try_=_AGAIN,
            )
        return BadFile(
            f"{self.name} holds code and was not opened",
            why=f"its pickle asks for {self._asked_for(opcode)} (opcode {_NAMED[opcode]}, byte {self.at - 1}); "
            "a memory snapshot holds numbers and text only",
            try_=_AGAIN,
        )

    def _asked_for(self, opcode: int) -> str:
        """The name that a refused opcode would have looked up, in printable characters."""
        if opcode in (0x63, 0x69):  # GLOBAL, INST: two lines of text
            lines = self.data[self.at : self.at + 400].split(b"\n")[:2]
            return ".".join(ascii(line.decode("utf-8", "replace"))[1:-1] for line in lines)
        if opcode == 0x93 and len(self.stack) >= 2:
            return ".".join(ascii(part)[1:-1][:200] for part in self.stack[-2:] if isinstance(part, str))
        return "an object"

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count or count < 0:
            raise IndexError(f"{count} bytes are missing at byte {self.at}")
        self.at += count
        return piece

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def pop_mark(self) -> list[object]:
        """What was pushed since the last mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def skip(self, count: int) -> None:
        self.take(count)

    def top(self) -> object:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("nothing since the mark")
        return self.stack[-1]

    def pop(self) -> object:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("nothing since the mark")
        return self.stack.pop()


Step = Callable[[_Reader], None]


def _push(make: Callable[[_Reader], object]) -> Step:
    def step(reader: _Reader) -> None:
        reader.stack.append(make(reader))

    return step


def _sized(width: int) -> Callable[[_Reader], bytes]:
    """Bytes whose length stands before them in `width` bytes."""
    return lambda reader: reader.take(reader.number(width))


def _text(width: int) -> Callable[[_Reader], str]:
    return lambda reader: reader.take(reader.number(width)).decode("utf-8", "surrogatepass")


def _long(reader: _Reader) -> int:
    length = reader.number(4)
    if length > _MOST_INT_BYTES:
        raise ValueError(f"an integer of {length} bytes")
    return int.from_bytes(reader.take(length), "little", signed=True)


def _tuple(count: int) -> Callable[[_Reader], object]:
    return lambda reader: tuple(reversed([reader.pop() for _ in range(count)]))


def _pop(reader: _Reader) -> None:
    reader.pop()


def _append(reader: _Reader) -> None:
    value = reader.pop()
    _list_on_top(reader).append(value)


def _appends(reader: _Reader) -> None:
    values = reader.pop_mark()
    _list_on_top(reader).extend(values)


def _set_item(reader: _Reader) -> None:
    value, key = reader.pop(), reader.pop()
    _fill(_dict_on_top(reader), [key, value])


def _set_items(reader: _Reader) -> None:
    values = reader.pop_mark()
    _fill(_dict_on_top(reader), values)


def _dict_of_marked(reader: _Reader) -> dict[object, object]:
    values = reader.pop_mark()
    made: dict[object, object] = {}
    _fill(made, values)
    return made


def _list_on_top(reader: _Reader) -> list[object]:
    top = reader.top()
    if type(top) is not list:
        raise TypeError(f"items are added to a {type(top).__name__}")
    return top


def _dict_on_top(reader: _Reader) -> dict[object, object]:
    top = reader.top()
    if type(top) is not dict:
        raise TypeError(f"entries are set in a {type(top).__name__}")
    return top


def _fill(target: dict[object, object], values: list[object]) -> None:
    for key, value in zip(values[::2], values[1::2], strict=True):
        if type(key) not in _KEYS:  # a nested tuple could exhaust the C stack when hashed
            raise TypeError(f"a {type(key).__name__} as key")
        target[key] = value


def _put(width: int) -> Step:
    def step(reader: _Reader) -> None:
        reader.memo[reader.number(width)] = reader.top()

    return step


_STEPS: dict[int, Step] = {
    0x80: lambda reader: reader.skip(1),  # PROTO
    0x95: lambda reader: reader.skip(8),  # FRAME
    0x30: _pop,
    0x4E: _push(lambda reader: None),
    0x88: _push(lambda reader: True),
    0x89: _push(lambda reader: False),
    0x4D: _push(lambda reader: reader.number(2)),  # BININT2
    0x8B: _push(_long),
    0x47: _push(lambda reader: struct.unpack(">d", reader.take(8))[0]),  # BINFLOAT
    0x8C: _push(_text(1)),  # SHORT_BINUNICODE
    0x58: _push(_text(4)),
    0x8D: _push(_text(8)),
    0x43: _push(_sized(1)),  # SHORT_BINBYTES
    0x42: _push(_sized(4)),
    0x8E: _push(_sized(8)),
    0x29: _push(lambda reader: ()),
    0x85: _push(_tuple(1)),
    0x86: _push(_tuple(2)),
    0x87: _push(_tuple(3)),
    0x74: _push(lambda reader: tuple(reader.pop_mark())),
    0x5D: _push(lambda reader: []),
    0x6C: _push(lambda reader: reader.pop_mark()),  # LIST
    0x7D: _push(lambda reader: {}),
    0x64: _push(_dict_of_marked),
    0x61: _append,
    0x65: _appends,
    0x73: _set_item,
    0x75: _set_items,
    0x71: _put(1),
    0x72: _put(4),
}
