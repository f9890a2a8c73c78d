import pytest

from tools.demo.languages import BY_CODE, LANGUAGES, concepts, proto_lexicon, sound_changes, word_forms


# Worked by hand from the rules, in their order.
@pytest.mark.parametrize(
    ("code", "proto", "today"),
    [
        ("qba_Latn", "petal", "pedal"),  # t is voiced between vowels
        ("qba_Latn", "kotiros", "ködiroz"),  # o is fronted before a later i; final s is voiced
        ("qbo_Latn", "petal", "fetol"),  # p to f; a before a final consonant to o
        ("qbo_Latn", "tikem", "sicen"),  # t to s before i, k to c before e, final m to n
        ("qka_Latn", "spewen", "špevin"),
        ("qko_Latn", "prash", "plåsx"),
        ("qko_Latn", "kalta", "kåwtå"),
        ("qna_Latn", "abaiz", "aves"),
        ("qno_Latn", "diguhav", "djiguaw"),  # h is lost after a vowel; g stays before u
    ],
)
def test_sound_changes_by_hand(code, proto, today):
    assert sound_changes(BY_CODE[code], proto) == today


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_no_two_meanings_share_a_word_form(language):
    owner = {}
    for concept, kind in concepts():
        for form in word_forms(language, proto_lexicon(language.family)[concept], kind):
            assert owner.setdefault(form, concept) == concept
    assert all(form and " " not in form for form in owner)
