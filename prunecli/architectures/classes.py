"""The classes of transformers that the families have, kin by kin."""

from __future__ import annotations

from prunecli.architectures.records import ModelClass

SEQ2SEQ = "AutoModelForSeq2SeqLM"
CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
SEQUENCES = "AutoModelForSequenceClassification"
TOKENS = "AutoModelForTokenClassification"
CHOICE = "AutoModelForMultipleChoice"
ANSWERS = "AutoModelForQuestionAnswering"


def base_class(name: str) -> ModelClass:
    """The base model, which every checkpoint of the family holds."""
    return ModelClass(name, "AutoModel")


def seq2seq_classes(family: str, headed: str = "ForConditionalGeneration") -> tuple[ModelClass, ...]:
    """Base model and language model of an encoder-decoder, whose classes begin with `family`."""
    return base_class(f"{family}Model"), ModelClass(f"{family}{headed}", SEQ2SEQ, ("lm_head.",))


def bart_classes(family: str) -> tuple[ModelClass, ...]:
    """Classes of BART and mBART."""
    return (
        *seq2seq_classes(family),
        ModelClass(f"{family}ForSequenceClassification", SEQUENCES, ("classification_head.",)),
        ModelClass(f"{family}ForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
    )


def decoder_classes(family: str) -> tuple[ModelClass, ...]:
    """Classes of Llama and families like it."""
    return (
        base_class(f"{family}Model"),
        ModelClass(f"{family}ForCausalLM", CAUSAL, ("lm_head.",)),
        ModelClass(f"{family}ForSequenceClassification", SEQUENCES, ("score.",), labelled=True),
        ModelClass(f"{family}ForTokenClassification", TOKENS, ("score.",), labelled=True),
    )


def roberta_classes(family: str) -> tuple[ModelClass, ...]:
    """Classes of RoBERTa and XLM-RoBERTa."""
    return (
        base_class(f"{family}Model"),
        ModelClass(f"{family}ForMaskedLM", MASKED, ("lm_head.dense.",)),
        ModelClass(f"{family}ForCausalLM", CAUSAL, ("lm_head.dense.",)),
        ModelClass(f"{family}ForSequenceClassification", SEQUENCES, ("classifier.out_proj.",)),
        ModelClass(
            f"{family}ForMultipleChoice", CHOICE, ("roberta.pooler.", "classifier.weight"), labelled=True
        ),
        ModelClass(f"{family}ForTokenClassification", TOKENS, ("classifier.weight",), labelled=True),
        ModelClass(f"{family}ForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
    )


BERT_CLASSES = (
    base_class("BertModel"),
    ModelClass(
        "BertForPreTraining", "AutoModelForPreTraining", ("bert.pooler.", "cls.predictions.", "cls.seq_")
    ),
    ModelClass("BertForMaskedLM", MASKED, ("cls.predictions.transform.",)),
    ModelClass("BertLMHeadModel", CAUSAL, ("cls.predictions.transform.",)),
    ModelClass(
        "BertForNextSentencePrediction", "AutoModelForNextSentencePrediction", ("bert.pooler.", "cls.seq_")
    ),
    ModelClass("BertForSequenceClassification", SEQUENCES, ("bert.pooler.", "classifier."), labelled=True),
    ModelClass("BertForMultipleChoice", CHOICE, ("bert.pooler.", "classifier."), labelled=True),
    ModelClass("BertForTokenClassification", TOKENS, ("classifier.",), labelled=True),
    ModelClass("BertForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
)

GPT2_CLASSES = (
    base_class("GPT2Model"),
    ModelClass("GPT2LMHeadModel", CAUSAL, ("lm_head.",)),
    ModelClass("GPT2ForSequenceClassification", SEQUENCES, ("score.",)),
    ModelClass("GPT2ForTokenClassification", TOKENS, ("classifier.",)),
    ModelClass("GPT2ForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
)

DISTILBERT_CLASSES = (
    base_class("DistilBertModel"),
    ModelClass("DistilBertForMaskedLM", MASKED, ("vocab_transform.",)),
    ModelClass(
        "DistilBertForSequenceClassification", SEQUENCES, ("pre_classifier.", "classifier."), labelled=True
    ),
    ModelClass("DistilBertForMultipleChoice", CHOICE, ("pre_classifier.", "classifier."), labelled=True),
    ModelClass("DistilBertForTokenClassification", TOKENS, ("classifier.",), labelled=True),
    ModelClass("DistilBertForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
)

OPT_CLASSES = (
    base_class("OPTModel"),
    ModelClass("OPTForCausalLM", CAUSAL, ("lm_head.",)),
    ModelClass("OPTForSequenceClassification", SEQUENCES, ("score.",)),
    ModelClass("OPTForQuestionAnswering", ANSWERS, ("qa_outputs.",)),
)

GEMMA3_CLASSES = (
    base_class("Gemma3TextModel"),
    ModelClass("Gemma3ForCausalLM", CAUSAL, ("lm_head.",)),
    ModelClass("Gemma3TextForSequenceClassification", SEQUENCES, ("score.",)),
)
