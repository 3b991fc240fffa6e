"""A recorder that proves on a CPU what a CUDA graph needs: it traces a region once and replays the trace.

Like a graph, a trace holds operations and no Python: every number is what it was when the region was recorded, and
a value read back from a tensor is an error, as is a tensor made of Python's numbers. Inputs are read where they lie,
and outputs are overwritten in place.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

READS_BACK = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero"}


class Slot(int):
    """A place in the trace's table of tensors."""


class Tape(TorchDispatchMode):
    """Operators in the order in which they ran, their tensors as places in a table.

    A tensor that is neither an input nor made inside (a weight) is a constant: it is read where it lies.
    """

    def __init__(self, inputs):
        super().__init__()
        self.calls, self.alive = [], list(inputs)  # held, so that no id is given twice
        self.slots = {id(tensor): Slot(place) for place, tensor in enumerate(inputs)}
        self.size = len(inputs)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.name() in READS_BACK:
            raise RuntimeError(f"{operator} reads a value back: it would be the same in every replay")
        if operator.name() == "aten::lift_fresh":
            raise RuntimeError(f"{operator} makes a tensor of Python numbers: a graph may not copy from the host")
        kwargs = kwargs or {}
        named_args, named_kwargs = self.name((args, kwargs))
        result = operator(*args, **kwargs)
        made = []
        for tensor in tree_flatten(result)[0]:
            made.append(Slot(self.size))
            if isinstance(tensor, torch.Tensor):
                self.slots[id(tensor)] = made[-1]
                self.alive.append(tensor)
            self.size += 1
        self.calls.append((operator, named_args, named_kwargs, made))
        return result

    def name(self, tree):
        return tree_map_only(torch.Tensor, lambda tensor: self.slots.get(id(tensor), tensor), tree)

    def run(self, inputs, outputs):
        """Repeat all of it on ``inputs``; the tensors at the places ``outputs``."""
        table = dict(enumerate(inputs))
        for operator, args, kwargs, made in self.calls:
            args, kwargs = tree_map_only(Slot, table.__getitem__, (args, kwargs))
            table.update(zip(made, tree_flatten(operator(*args, **kwargs))[0], strict=True))
        return [table[place] for place in outputs]


class TracingRecorder:
    """Counts what it recorded and replayed: ``recorded`` the rows of each region, ``replays`` the runs."""

    def __init__(self):
        self.recorded, self.replays, self.operators = [], 0, []

    def record(self, region, inputs):
        inputs = list(inputs)
        with Tape(inputs) as tape:
            outputs = region(*inputs)
        places = tape.name(list(outputs))
        assert all(isinstance(place, Slot) for place in places), "an output that no operator made"
        self.recorded.append(len(inputs[0]))
        self.operators.append(len(tape.calls))
        static = tuple(torch.full_like(tensor, 0) for tensor in outputs)
        tape.alive.clear()

        def replay():
            self.replays += 1
            for place, tensor in zip(static, tape.run(inputs, places), strict=True):
                place.copy_(tensor)
            return static

        return replay
