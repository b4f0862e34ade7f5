"""The late device itself: it finds what it is for, and lets pass what is right."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.late.late_device import Access, LateDevice, LateStorage, LateStream, Race, World


def write(stream: LateStream, storage: LateStorage, value: int, part: slice = slice(None)) -> None:
    memory, whole = storage.access.memory[part], storage.access
    begin = whole.address + (part.start or 0)
    stream.world.queue(
        stream,
        lambda: memory.__setitem__(slice(None), bytes((value,)) * len(memory)),
        f"{value} written on {stream}",
        writes=(Access(begin, memory),),
    )


def read(stream: LateStream, storage: LateStorage) -> list[bytes]:
    seen: list[bytes] = []
    memory = storage.access.memory
    stream.world.queue(
        stream, lambda: seen.append(bytes(memory)), f"read on {stream}", reads=(storage.access,)
    )
    return seen


@pytest.fixture
def device() -> LateDevice:
    return LateDevice(World())


def test_what_an_event_orders_is_no_race_and_what_none_does_is(device: LateDevice) -> None:
    one, other = device.default, device.new_stream()
    storage = device.memory.allocate(100)
    write(one, storage, 1)
    other.wait_event(one.record_event())
    seen = read(other, storage)
    with pytest.raises(Race, match="2 written on gpu0 compute is not ordered after read on gpu0 side"):
        write(one, storage, 2)
    device.world.run()
    write(one, storage, 3)  # the host has waited for all
    device.world.run()
    assert seen == [bytes((1,)) * 100]


def test_parts_of_a_storage_are_told_apart(device: LateDevice) -> None:
    one, other = device.default, device.new_stream()
    storage = device.memory.allocate(100)
    write(one, storage, 1, slice(0, 40))
    write(other, storage, 2, slice(40, 100))
    with pytest.raises(Race):
        write(one, storage, 3, slice(39, 41))


def test_the_host_orders_what_it_has_seen(device: LateDevice) -> None:
    one, other = device.default, device.new_stream()
    storage = device.memory.allocate(100)
    write(one, storage, 1)
    event = one.record_event()
    event.synchronize()
    assert event.query()
    write(other, storage, 2)
    second = other.record_event()
    while not second.query():
        pass
    write(one, storage, 3)


def test_streams_run_in_many_orders() -> None:
    orders = set()
    for seed in range(300):
        device = LateDevice(World(seed))
        done: list[str] = []
        for name in "abc":
            stream = device.new_stream()
            for number in range(2):
                device.world.queue(stream, functools.partial(done.append, f"{name}{number}"), "")
        device.world.run()
        assert all(done.index(f"{name}0") < done.index(f"{name}1") for name in "abc")
        orders.add(tuple(done))
    assert len(orders) > 30


def test_freed_memory_is_its_streams_at_once_and_poisoned(device: LateDevice) -> None:
    storage = device.memory.allocate(100)
    address = storage.access.address
    write(device.default, storage, 1)
    before = read(device.default, storage)
    del storage
    again = device.memory.allocate(100)
    assert again.access.address == address
    after = read(device.default, again)
    device.world.run()
    assert (before, after) == ([bytes((1,)) * 100], [bytes((0xEE,)) * 100])
    other = device.new_stream()
    device.compute_on(other)
    del again
    assert device.memory.allocate(100).access.address != address, "another stream's"


def test_memory_that_another_stream_uses_waits_for_it() -> None:
    for seed in range(20):
        device = LateDevice(World(seed))
        one, other = device.default, device.new_stream()
        storage = device.memory.allocate(100)
        write(one, storage, 1)
        other.wait_event(one.record_event())
        seen = read(other, storage)
        address = storage.access.address
        device.uses(storage, other)
        del storage
        again = device.memory.allocate(100)
        assert again.access.address != address or seen, "the reader is done"
        write(one, again, 2)
        device.world.run()
        assert seen == [bytes((1,)) * 100]
        assert device.memory.allocate(100).access.address == address


def test_without_a_word_to_the_allocator_that_is_a_race(device: LateDevice) -> None:
    one, other = device.default, device.new_stream()
    storage = device.memory.allocate(100)
    write(one, storage, 1)
    other.wait_event(one.record_event())
    read(other, storage)
    del storage
    with pytest.raises(Race, match="the next owner of memory of gpu0 compute is not ordered after read"):
        device.memory.allocate(100)


def test_memory_ends(device: LateDevice) -> None:
    held = [device.memory.allocate(1 << 18) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError):
        device.memory.allocate(100)
    held.pop()
    device.memory.allocate(1 << 18)


def test_a_capture_bears_no_question_and_no_copy(device: LateDevice) -> None:
    event = device.default.record_event()
    device.world.capturing = True
    for act in (event.query, event.synchronize, device.default.record_event):
        with pytest.raises(AssertionError, match="a graph is being captured"):
            act()
