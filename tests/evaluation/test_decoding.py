import pytest
import torch
from transformers import BartConfig, BartForQuestionAnswering

from prunecli.errors import UnsupportedModelError
from prunecli.evaluation.decoding import DecodingOptions, Translation, translate
from prunecli.modules.loading import load_model
from prunecli.running.encoding import length_limit
from prunecli.text.tokens import encode, language_id, load_tokenizer
from tests.tiny import tiny_nllb_moe

SENTENCES = ("the hat", "", "a", "the hen is on the hat in the inn", "no", "the hat is thin then")
PAIR = ("eng_Latn", "fra_Latn")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tiny_nllb_moe(tmp_path_factory.mktemp("decoding") / "model")
    return load_model(path, device="cpu"), load_tokenizer(path)


def _one_by_one(model, tokenizer, beam, limit):
    """Each sentence alone through `generate`, without padding, batches or a cache of our own."""
    texts = []
    for sentence in SENTENCES:
        ids = torch.tensor(encode(tokenizer, [sentence], PAIR[0]))
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beam,
            do_sample=False,
            max_length=None,
            max_new_tokens=limit,
            forced_bos_token_id=language_id(tokenizer, PAIR[1]),
        )
        texts.append(tokenizer.decode(output[0], skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_batches_change_nothing_and_results_come_in_file_order(loaded, batch_tokens):
    options = DecodingOptions(3, batch_tokens, max_new_tokens=8)
    made = translate(*loaded, SENTENCES, PAIR, options)
    assert [translation.text for translation in made] == _one_by_one(*loaded, 3, 8)


class _Scripted:
    """A model that puts out given ids."""

    def __init__(self, model, rows):
        self.config, self.device, self.generation_config = model.config, model.device, model.generation_config
        self._rows = rows

    main_input_name = "input_ids"

    def can_generate(self):
        return True

    def generate(self, **settings):
        self.settings = settings
        return torch.tensor(self._rows)


def test_an_output_without_end_token_was_ended_by_the_limit(loaded):
    model, tokenizer = loaded
    letter = tokenizer.convert_tokens_to_ids("a")
    french = language_id(tokenizer, "fra_Latn")
    # The first id starts the decoder and is the end token too: it does not count.
    scripted = _Scripted(model, [[2, french, letter, letter], [2, french, letter, 2]])
    made = translate(scripted, tokenizer, ["a", "a"], PAIR, DecodingOptions(2))
    assert made == [Translation("aa", finished=False), Translation("a", finished=True)]
    assert scripted.settings["forced_bos_token_id"] == french
    assert scripted.settings["max_new_tokens"] == length_limit(3, 64)


def test_a_model_that_generates_nothing_is_refused(loaded):
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=99)
    with pytest.raises(UnsupportedModelError, match="BartForQuestionAnswering, which has no head"):
        translate(BartForQuestionAnswering(config), loaded[1], ["a"], PAIR, DecodingOptions(2))


@pytest.mark.parametrize(("tokens", "positions", "limit"), [(10, None, 80), (10, 1024, 80), (100, 256, 255)])
def test_length_limit(tokens, positions, limit):
    assert length_limit(tokens, positions) == limit
