"""SentencePiece files read and shortened, against the library itself."""

from __future__ import annotations

import pytest

from prunecli.methods.vocabulary.tokenizer import BPE, NORMAL, UNIGRAM, read_model, without_pieces
from tests.methods.vocabulary.makers import TEXT, sentencepiece_model


@pytest.mark.parametrize(("kind", "number"), [("unigram", UNIGRAM), ("bpe", BPE)])
def test_reads_what_the_library_reads(kind: str, number: int) -> None:
    from sentencepiece import SentencePieceProcessor

    data = sentencepiece_model(TEXT, kind, 70)
    (pieces, model_type), library = read_model(data), SentencePieceProcessor(model_proto=data)
    assert model_type == number
    assert len(pieces) == library.get_piece_size()
    for place, piece in enumerate(pieces):
        assert piece.text == library.id_to_piece(place)
        assert piece.score == library.get_score(place)
        assert (piece.type == NORMAL) == (not library.is_control(place) and not library.is_unknown(place))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_others_stay_in_their_order(kind: str) -> None:
    from sentencepiece import SentencePieceProcessor

    full = sentencepiece_model(TEXT, kind, 70)
    pieces, model_type = read_model(full)
    dropped = {piece.text for piece in pieces[5::3]} | {"<s>", "no piece"}
    data = without_pieces(full, dropped)
    library = SentencePieceProcessor(model_proto=data)
    wanted = [piece.text for piece in pieces if piece.text not in dropped or piece.type != NORMAL]
    assert [library.id_to_piece(place) for place in range(library.get_piece_size())] == wanted
    assert "<s>" in wanted
    assert read_model(data)[1] == model_type


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"IQ== 0\nIg== 1\n",  # a tiktoken vocabulary
        b"\x0a\x05ab",  # longer than the file
        b"\x0b\x00",  # a wire type that no longer exists
        b"\x80\x80\x80",  # a number without an end
        b"\x08\x01",  # pieces that are numbers
        sentencepiece_model(TEXT, "bpe", 60)[:-3],
    ],
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        read_model(data)
