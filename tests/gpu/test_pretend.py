"""The pretended GPU refuses and counts what a real one does."""

import pytest
import torch
from torch import Tensor

from tests.gpu.pretend import Pretend

WAITING = {
    "item": (lambda numbers: numbers[0].item(), 1),
    "a branch": (lambda numbers: bool((numbers > 0).all()), 1),
    "a list": (lambda numbers: numbers.tolist(), 1),
    "to the host": (lambda numbers: numbers.cpu(), 1),
    "to a named device": (lambda numbers: numbers.to("cpu"), 1),
    "a mask": (lambda numbers: numbers[numbers > 1], 1),
    "nonzero": (lambda numbers: numbers.nonzero(), 1),
    "bincount": (lambda numbers: torch.bincount(numbers), 2),
    "repeats": (lambda numbers: numbers.repeat_interleave(numbers), 1),
    "repeats of a known number": (lambda numbers: numbers.repeat_interleave(numbers, output_size=6), 0),
    "indices": (lambda numbers: numbers[numbers], 0),
    "products": (lambda numbers: (numbers.float() @ numbers.float()).relu(), 0),
    "filling by a mask": (lambda numbers: numbers.masked_fill(numbers > 1, 0), 0),
    "sorting": (lambda numbers: numbers.argsort(stable=True), 0),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_are_counted(name, gpu):
    call, waits = WAITING[name]
    numbers = torch.tensor([0, 1, 2, 3])
    want = call(numbers)
    with gpu:
        there = numbers.to(gpu.device)
        call(there)  # what is only done once
        gpu.reset()
        found = call(there)
        counted = sum(gpu.waits.values())
        found = found.cpu() if isinstance(found, Tensor) else found
    assert counted == waits if isinstance(gpu, Pretend) else (counted > 0) == (waits > 0)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(want))


@pytest.mark.parametrize(
    "call", [lambda there, here: there + here, lambda there, here: torch.cat([there, here])]
)
def test_tensors_of_two_devices_are_refused(call, gpu):
    numbers = torch.tensor([0, 1, 2, 3])
    with gpu, pytest.raises(RuntimeError, match=r"same device"):
        call(numbers.to(gpu.device), numbers)


def test_copies_to_it_and_bytes_on_it():
    pretend, numbers = Pretend(), torch.arange(1000, dtype=torch.float32)
    with pretend:
        there = numbers.to("cuda")
        torch.tensor([1], device="cuda")
        there.copy_(numbers)
        assert sum(pretend.uploads.values()) == 3
        assert all(where.startswith("test_pretend.py:") for _, where in pretend.uploads)
        doubled = there * 2
        view = doubled[10:]
        assert pretend.live == 8000
        del doubled
        assert pretend.live == 8000
        del view
        assert pretend.live == 4000
        assert pretend.peak >= 8000


def test_two_of_them_are_two_devices(monkeypatch):
    pretend = Pretend(total=10_000, count=2)
    pretend.patch(monkeypatch)
    with pretend:
        first = torch.arange(1000, dtype=torch.float32, device="cuda")
        second = first.to("cuda:1")
        assert [str(one.device) for one in (first, second, second * 2)] == ["cuda:0", "cuda:1", "cuda:1"]
        assert pretend.hops.total() == 1
        with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cuda:1"):
            first + second
        with pytest.raises(RuntimeError, match=r"ordinal"):
            first.to("cuda:2")
        assert [torch.cuda.memory_allocated(number) for number in (0, 1)] == [4000] * 2
        # What held second * 2 stays taken.
        assert [torch.cuda.mem_get_info(number) for number in (0, 1)] == [(6000, 10_000), (2000, 10_000)]
        moved = torch.nn.Linear(2, 2).to("cuda:0").to("cuda:1")
        assert str(moved.weight.device) == "cuda:1"
        weight = torch.ones(3, device="cuda:0").requires_grad_()
        (weight.to("cuda:1") * torch.ones(3, device="cuda:1")).sum().backward()
        assert weight.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("waits", [False, True])
def test_streams_that_nothing_orders(waits, monkeypatch):
    pretend = Pretend()
    pretend.patch(monkeypatch)
    with pretend:
        numbers, side = torch.ones(4, device="cuda") * 2, torch.cuda.Stream()
        if waits:
            side.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(side):
            numbers.mul_(3)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        numbers.add_(1)
    assert pretend.timeline.races.total() == (0 if waits else 2)
