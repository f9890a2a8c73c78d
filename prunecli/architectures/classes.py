"""The classes of transformers that the families have, kin by kin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from prunecli.architectures.records import ModelClass

SEQ2SEQ = "AutoModelForSeq2SeqLM"
AUTO = {"ForConditionalGeneration": SEQ2SEQ, "MTModel": SEQ2SEQ, "LMHeadModel": "AutoModelForCausalLM"}
"""End of a class's name -> the `AutoModel…` that opens it, where that does not end so too."""

LABELLING = ("Classification", "MultipleChoice")
"""Ends of the names of classes that give a label to a text or to its tokens."""


def model_classes(
    family: str, heads: Mapping[str, tuple[str, ...]], base: str = "Model"
) -> tuple[ModelClass, ...]:
    """The base model, which every checkpoint of a family holds, and its classes with a head.

    Args:
        family: what their names begin with.
        heads: end of a class's name -> what it needs, see `ModelClass`.
        base: end of the base model's name.
    """
    labels = Counter(needs[-1] for ending, needs in heads.items() if ending.endswith(LABELLING))
    return (
        ModelClass(f"{family}{base}", "AutoModel"),
        *(
            ModelClass(
                f"{family}{ending}",
                AUTO.get(ending, f"AutoModel{ending.removeprefix('Text')}"),
                needs,
                labelled=ending.endswith(LABELLING) and labels[needs[-1]] > 1,
            )
            for ending, needs in heads.items()
        ),
    )


def seq2seq_classes(
    family: str, headed: str = "ForConditionalGeneration", *, more: Mapping[str, tuple[str, ...]] = {}
) -> tuple[ModelClass, ...]:
    """Classes of an encoder-decoder; `more`: as `heads` of `model_classes`."""
    return model_classes(family, {headed: ("lm_head.",), **more})


BART_HEADS = {
    "ForSequenceClassification": ("classification_head.",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

DECODER_HEADS = {
    "ForCausalLM": ("lm_head.",),
    "ForSequenceClassification": ("score.",),
    "ForTokenClassification": ("score.",),
}

ROBERTA_HEADS = {
    "ForMaskedLM": ("lm_head.dense.",),
    "ForCausalLM": ("lm_head.dense.",),
    "ForSequenceClassification": ("classifier.out_proj.",),
    "ForMultipleChoice": ("roberta.pooler.", "classifier.weight"),
    "ForTokenClassification": ("classifier.weight",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

BERT_HEADS = {
    "ForPreTraining": ("bert.pooler.", "cls.predictions.", "cls.seq_"),
    "ForMaskedLM": ("cls.predictions.transform.",),
    "LMHeadModel": ("cls.predictions.transform.",),
    "ForNextSentencePrediction": ("bert.pooler.", "cls.seq_"),
    "ForSequenceClassification": ("bert.pooler.", "classifier."),
    "ForMultipleChoice": ("bert.pooler.", "classifier."),
    "ForTokenClassification": ("classifier.",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

GPT2_HEADS = {
    "LMHeadModel": ("lm_head.",),
    "ForSequenceClassification": ("score.",),
    "ForTokenClassification": ("classifier.",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

DISTILBERT_HEADS = {
    "ForMaskedLM": ("vocab_transform.",),
    "ForSequenceClassification": ("pre_classifier.", "classifier."),
    "ForMultipleChoice": ("pre_classifier.", "classifier."),
    "ForTokenClassification": ("classifier.",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

OPT_HEADS = {
    "ForCausalLM": ("lm_head.",),
    "ForSequenceClassification": ("score.",),
    "ForQuestionAnswering": ("qa_outputs.",),
}

GEMMA3_HEADS = {"ForCausalLM": ("lm_head.",), "TextForSequenceClassification": ("score.",)}
