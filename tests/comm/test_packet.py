"""A packet's header and description survive the wire, and are refused if they are invalid."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from svdpp.comm.packet import FIELDS, HEADER_BYTES, Description, Header, Packet, describe
from svdpp.errors import TransportError

HEADERS = st.builds(Header, st.integers(0, 2**31), st.integers(0, 2**32 - 1), st.integers(0, 2**63))
HEADER = Header(40, 7, 12)
CPU, NOTHING = torch.device("cpu"), torch.empty(0, dtype=torch.uint8)
PACKETS = st.builds(
    Packet,
    st.integers(0, 2**63),
    st.integers(0, 2**31),
    st.floats(0, 1e12),
    st.just({}),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1e12),
)


@given(HEADERS)
def test_header_survives_the_wire(header: Header) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert Header.unpack(data) == header


@given(PACKETS)
def test_what_is_said_of_a_packet_survives_the_wire(packet: Packet) -> None:
    assert Description(describe(packet, CPU)).packet(NOTHING) == packet


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        Header.unpack(data)


@pytest.mark.long
@given(HEADERS, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(header: Header, position: int, change: int) -> None:
    data = bytearray(header.pack())
    data[position] ^= change
    with pytest.raises(TransportError):
        Header.unpack(bytes(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clip": 4}, "clip: sent 3, expected 4"),
        ({"next_step": 12}, "next step: sent 8, expected 12"),
        ({"sequence": 6}, "sequence number: sent 5, expected 6"),
    ],
)
def test_check_names_the_field_and_both_sides(change: dict[str, int], words: str) -> None:
    description = Description(describe(Packet(3, 8, 1.5, {}), CPU, sequence=5))
    expected = {"clip": 3, "next_step": 8, "sequence": 5}
    description.check(**expected)
    with pytest.raises(TransportError) as caught:
        description.check(**{**expected, **change})
    assert words in caught.value.message


def test_a_damaged_byte_count_is_refused_before_the_payload_is_read() -> None:
    data = bytearray(HEADER.pack())
    struct.pack_into("<Q", data, FIELDS["bytes"], 13)
    with pytest.raises(TransportError, match="the header is damaged"):
        Header.unpack(bytes(data))


def test_tensors_in_host_memory_are_in_the_description() -> None:
    packet = Packet(0, 1, 2.5, {"step": torch.tensor(7), "state": torch.arange(5).byte()})
    back = Description(describe(packet, torch.device("cuda"))).packet(NOTHING)
    assert list(back.tensors) == ["step", "state"]
    assert all(torch.equal(back.tensors[name], each) for name, each in packet.tensors.items())
    assert replace(back, tensors={}) == replace(packet, tensors={})


@pytest.mark.parametrize(
    ("entries", "more", "words"),
    [
        (b"?", b"", "cannot be read"),
        (b'[["latents", "float33", [1], false]]', b"", "cannot be read"),
        (b'[["latents", "float32", [2], false]]', b"", "of 4 bytes is described as 8"),
        (b"[]", b"more", "of 4 bytes is described as 0"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    entries: bytes, more: bytes, words: str
) -> None:
    whole = describe(Packet(0, 1, 0.0, {}), CPU).replace(b'"tensors": []', b'"tensors": ' + entries)
    assert entries in whole
    with pytest.raises(TransportError, match=words):
        Description(whole + more).packet(torch.zeros(4, dtype=torch.uint8))
