import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prunecli import demo
from prunecli.running.examples import Batch, Examples
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import read_parallel
from prunecli.training.data import BucketSampler, loader, read_training_data

LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60)


class Numbered(Examples):
    """Examples that say which rows they are."""

    lengths = ()

    def __init__(self, lengths):
        self.lengths = lengths

    def batch(self, rows):
        return Batch({"rows": torch.tensor(rows)}, torch.tensor(rows), tuple(rows))


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 9), st.integers(0, 3), st.integers(1, 3))
def test_processes_share_the_batches_of_an_epoch(lengths, budget, seed, epoch, processes):
    shares = []
    for rank in range(processes):
        sampler = BucketSampler(Numbered(lengths), budget, seed, rank, processes)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    rows = [row for share in shares for batch in share for row in batch]
    assert len(rows) == len(set(rows))
    if processes == 1:
        assert sorted(rows) == list(range(len(lengths)))
    for batch in (batch for share in shares for batch in share):
        longest = max(max(lengths[row]) for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_the_order_is_of_the_epoch_and_the_seed():
    lengths = [(size % 7 + 1, size % 5 + 1) for size in range(80)]

    orders = []
    for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1)):
        sampler = BucketSampler(Numbered(lengths), 20, seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1]
    assert orders[0] not in orders[2:]


def test_a_loader_leaves_the_random_numbers_of_dropout_alone():
    made = loader(BucketSampler(Numbered([(3, 3)] * 10), 6, 0))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    made.set_epoch(2)
    rows = [row for batch in made for row in batch["rows"].tolist()]
    assert torch.equal(torch.rand(3), expected)
    assert sorted(rows) == list(range(10))


DEMO = TextChoice(split="train", pairs="qba_Latn-qbo_Latn", max_sentences=3, demo=demo.DATA)


@pytest.mark.parametrize(("asked", "split"), [(None, "val"), ("test", "test")])
def test_the_demo_validates_on_the_split_asked_for(asked, split):
    languages = ("qba_Latn", "qbo_Latn")
    data = read_training_data("translation", DEMO, TextChoice(split=asked, max_sentences=2))
    assert data.train == read_parallel(demo.DATA, "train", languages).first(3)
    assert data.valid == read_parallel(demo.DATA, split, languages).first(2)
