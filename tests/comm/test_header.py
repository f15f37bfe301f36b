"""The header describes a packet, is packed and unpacked, and is refused if it is invalid."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdpp.comm.packet import FIELDS, HEADER_BYTES, Header
from svdpp.errors import TransportError

HEADERS = st.builds(
    Header,
    st.integers(0, 2**63),
    st.integers(0, 2**31),
    st.integers(0, 2**63),
    st.floats(0, 1e12),
    st.integers(0, 2**20),
    st.integers(0, 2**63),
    compute_seconds=st.floats(0, 1e12),
)
HEADER = Header(3, 8, 5, 1.5, 40, 12)


@pytest.mark.long
@given(HEADERS)
def test_header_survives_the_wire(header: Header) -> None:
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert Header.unpack(data) == header


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
def test_check_names_the_field_and_both_sides(change: dict[str, object], words: str) -> None:
    expected = {"clip": 3, "next_step": 8, "sequence": 5}
    HEADER.check(**expected)  # type: ignore[arg-type]
    with pytest.raises(TransportError) as caught:
        HEADER.check(**{**expected, **change})  # type: ignore[arg-type]
    assert words in caught.value.message


def test_another_protocol_version_is_named_with_the_mend() -> None:
    data = bytearray(HEADER.pack())
    struct.pack_into("<H", data, 8, 7)
    with pytest.raises(TransportError) as caught:
        Header.unpack(bytes(data))
    assert "protocol 7, this rank 5" in caught.value.message
    assert "same svdpp version" in caught.value.hint


def test_a_damaged_byte_count_is_refused_before_the_payload_is_read() -> None:
    data = bytearray(HEADER.pack())
    struct.pack_into("<Q", data, FIELDS["bytes"], 13)
    with pytest.raises(TransportError, match="the header is damaged"):
        Header.unpack(bytes(data))
