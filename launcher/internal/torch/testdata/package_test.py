"""Tests of the package soliton without workers. TestPythonPackage runs them."""

import contextlib
import json
import mmap
import os
import pickle
import shutil
import signal
import struct
import tempfile
import types
import unittest
from unittest import mock

import soliton
import torch
from torch import nn

from soliton import _child, _describe, _device, _process

F = nn.functional


class Data(torch.utils.data.Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.make(i)


def plain(i):
    return torch.randn(4), torch.tensor(i % 2)


def job(**given):
    numbers = {"layers": [nn.Linear(4, 2)], "loss": F.cross_entropy, "data": Data(plain), "optimizer": soliton.SGD(lr=0.1), "global_batch": 4, "steps": 3}
    numbers.update(given)
    return soliton.Job(**numbers)


def program(**given):
    _describe.seed(0)
    layers = given.get("layers")
    if callable(layers):
        given["layers"] = layers()
    return _describe.Program(job(**given), os.path.dirname(__file__))


class Worker:
    """Plays a worker: runs a computing process's calls in this process, over shared memory."""

    def __init__(self, program):
        self.program, self.at, self.values = program, 4096, 0
        if program.device.copies:
            program.begin_device()
        memory = os.memfd_create("memory")
        os.ftruncate(memory, 1 << 20)
        self.computer, self.all = _child.Computer(program, memory, program.device), mmap.mmap(memory, 1 << 20)
        self.params = []
        for i, layer in enumerate(program.layers):
            self.params.append(self.take(sum(p.numel() for p in layer.params)))
            self.computer.first(i, self.params[i])

    def take(self, words):
        at, self.at = self.at, self.at + 64 * (words // 16 + 1)
        return at

    def run(self, borders, samples=4, crossing=False, offset=0, slot=0, merges=()):
        """Returns the loss and the gradients of a micro-batch; the layers in borders get their input from another stage.

        crossing has the gradient of the loss cross the shared memory, as a worker does that repeats a pass. offset is that of the samples, and with
        slot the gradients stay in the process.
        """
        layers, data = self.program.layers, self.program.data
        self.values += 1
        size = [torch.Size(data.spec(side)["shape"]).numel() for side in (0, 1)]
        x, y = self.take(size[0] * samples), self.take(size[1] * samples)
        for i in range(samples):
            self.computer.sample(0, offset + i, i, x + 4 * i * size[0], y + 4 * i * size[1])
        words = [layer.width(samples) for layer in layers]
        ends = [i + 1 for i in range(len(layers)) if i + 1 in borders] + [len(layers)]
        lo, at = 0, x
        for stage, hi in enumerate(ends):
            to = self.take(words[hi - 1])
            for i in range(lo, hi):
                self.computer.forward(stage, i, i == lo, 1, samples, at, self.params[i], 100 + i, to if i == hi - 1 else 0, self.values)
            lo, at = hi, to
        back = self.take(words[-1]) if crossing else 0
        total, count = struct.unpack("<dq", self.computer.loss(len(ends) - 1, y, 99, back))
        found = {}
        for stage, hi in reversed(list(enumerate(ends))):
            lo = ends[stage - 1] if stage else 0
            grads = {i: self.take(sum(p.numel() for p in layers[i].params)) for i in range(lo, hi)}
            below = self.take(words[lo - 1]) if lo else 0
            for i in reversed(range(lo, hi)):
                self.computer.backward(stage, i, i == lo, self.params[i], 200 + i, back if i == hi - 1 else 0, grads[i], below if i == lo else 0, slot, *merges)
                n = 4 * sum(p.numel() for p in layers[i].params)
                found[i] = self.all[grads[i]:grads[i] + n]
            back = below
        return total, count, found


class Start(nn.Module):
    """Gives the next layer two tensors of floats and three of integers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 6)

    def forward(self, tokens, scale):
        x = self.table(tokens) * scale.unsqueeze(-1)
        return x, scale, tokens + (1 << 40), tokens.to(torch.int32), tokens > 3


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x, scale, far, near, mask):
        assert far.dtype == torch.int64 and near.dtype == torch.int32 and mask.dtype == torch.bool
        assert torch.equal(far - (1 << 40), near.long())
        return self.drop(self.inner(x)) * (scale * 2).unsqueeze(-1), scale + x.mean(-1), far, near, mask


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 10)

    def forward(self, x, scale, far, near, mask):
        return self.out(x * mask.unsqueeze(-1)) + self.out.weight.mean() * scale.unsqueeze(-1), near


def several(i):
    return (torch.arange(5) + i % 5, torch.rand(5)), (torch.arange(5), torch.rand(5))


def several_loss(out, target):
    logits, near = out
    tokens, weights = target
    each = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none") * weights.flatten() * (near.flatten() + 1)
    return each.sum(), tokens.numel()


class TestTuples(unittest.TestCase):
    def test_bits_do_not_depend_on_stages(self):
        p = program(layers=lambda: [Start(), Middle(), Middle(), End()], loss=several_loss, data=Data(several))
        want = Worker(p).run(borders=())
        self.assertEqual(want[1], 20)
        for borders in [(1,), (2,), (1, 3), (1, 2, 3)]:
            self.assertEqual(Worker(p).run(borders), want, borders)
            self.assertEqual(Worker(p).run(borders, crossing=True), want, borders)

    def test_packed(self):
        p = program(layers=lambda: [Start(), Middle(), End()], loss=several_loss, data=Data(several))
        out = [layer["out"] for layer in p.describe()["layers"]]
        self.assertEqual(out, [[30 + 5 + 10 + 5 + 5]] * 2 + [[50 + 5]])
        self.assertEqual(p.describe()["input"], {"shape": [15], "integer": True})


class Table(nn.Module):
    """Looks tokens up in a table, of which it has one or borrows one."""

    def __init__(self, table=None):
        super().__init__()
        self.pad = nn.Parameter(torch.randn(3))  # so that the table is not at the border of a cache line
        self.table = nn.Parameter(torch.randn(10, 6)) if table is None else table

    def forward(self, x):
        return F.dropout(self.table[x] if x.dtype == torch.int64 else x @ self.table.t() @ self.table, 0.2) + self.pad.sum()


class Logits(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x @ self.table.t()


class TestTied(unittest.TestCase):
    def layers(self, wrap=lambda m: m):
        first = Table()
        return [first, nn.Linear(6, 6), wrap(Table(first.table)), nn.Linear(6, 6), Logits(first.table)]

    def program(self, **given):
        data = Data(lambda i: (torch.arange(4) + i % 5, torch.arange(4)))
        return program(layers=self.layers, loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()), data=data, **given)

    def test_bits_do_not_depend_on_stages(self):
        p = self.program()
        want = Worker(p).run(borders=())
        self.assertEqual([len(want[2][i]) for i in range(5)], [4 * 63, 4 * 42, 12, 4 * 42, 0])
        for borders in [(1,), (2,), (3,), (4,), (1, 3), (2, 4), (1, 2, 3, 4)]:
            for q in (p, self.program()):
                self.assertEqual(Worker(q).run(borders), want, borders)

    def test_gradient_is_whole(self):
        _describe.seed(0)
        layers = self.layers()
        p = self.program()
        _, _, found = Worker(p).run((2,))
        x, target = torch.stack([torch.arange(4) + i % 5 for i in range(4)]), torch.arange(4).repeat(4)
        for i, layer in enumerate(layers):
            _describe.seed(100 + i)
            x = layer(x)
        F.cross_entropy(x.flatten(0, 1), target).backward()
        grad = torch.frombuffer(bytearray(found[0]), dtype=torch.float32)[3:].reshape(10, 6)
        self.assertTrue(torch.allclose(grad, layers[0].table.grad, rtol=1e-4, atol=1e-6))

    def test_names(self):
        told = self.program().describe()
        self.assertEqual([p["name"] for layer in told["layers"] for p in layer["params"]],
                         ["0.pad", "0.table", "1.weight", "1.bias", "2.pad", "3.weight", "3.bias"])
        self.assertEqual(told["identity"]["tied"], {"2.table": "0.table", "4.table": "0.table"})
        self.assertEqual([layer["carries"] for layer in told["layers"]], [60, 60, 60, 60, 0])

    def test_one_module_twice(self):
        m = nn.Linear(4, 4)
        p = program(layers=[m, m, nn.Linear(4, 2)])
        self.assertEqual(Worker(p).run((1, 2)), Worker(p).run(()))


def words(i):
    """A sample as many data sets give them: a dict of a list of some length, and a label."""
    return {"text": list(range(1, 2 + i % 4)), "noise": float(torch.rand(())), "label": i % 2}


def mixed(samples):
    """Pads, and mixes each sample with another one."""
    x = torch.zeros(len(samples), 4)
    for row, s in zip(x, samples):
        text = torch.tensor(s.pop("text"))  # writes to the sample
        row[:len(text)] = text + s["noise"]
    y = torch.tensor([float(s["label"]) for s in samples])
    order, share = torch.randperm(len(samples)), torch.rand(())
    return share * x + (1 - share) * x[order], (share * y + (1 - share) * y[order], torch.arange(len(samples)))


def mixed_loss(out, target):
    return F.binary_cross_entropy_with_logits(out.squeeze(1), target[0], reduction="sum"), len(out)


class TestCollate(unittest.TestCase):
    def program(self, **given):
        numbers = {"layers": lambda: [nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)], "loss": mixed_loss, "data": Data(words), "collate": mixed}
        numbers.update(given)
        return program(**numbers)

    def test_bits_do_not_depend_on_stages(self):
        p = self.program()
        want = Worker(p).run(borders=())
        self.assertEqual(want[1], 4)
        for borders in [(), (1,), (2,), (1, 2)]:
            self.assertEqual(Worker(p).run(borders), want, borders)
        lost = Worker(self.program())
        sample = lost.computer.sample

        def forgets(*numbers):
            sample(*numbers)
            lost.program.data.kept.clear()  # as in a process that takes the place of the one that has read it

        lost.computer.sample = forgets
        self.assertEqual(lost.run((1,)), want)

    def test_is_what_the_function_makes(self):
        p = self.program(eval=Data(words))
        for source in (p.data, p.eval):
            rows = torch.stack([source.packed(i, 7 + i)[0] for i in (2, 5, 3)])
            x, (y, order) = p.data.unpack(rows, 0), p.data.unpack(rows, 1)
            self.assertEqual((list(x[0].shape), y.dtype, order.dtype), ([3, 4], torch.float32, torch.int64))
            self.assertEqual(len(source.kept), 0)
            x[0].zero_()  # which is a copy
            self.assertNotEqual(float(p.data.unpack(rows, 0)[0].sum()), 0)
        self.assertNotEqual(p.describe()["data_sha256"], self.program(data=Data(lambda i: words(i + 1))).describe()["data_sha256"])

    def test_read_by_other_processes(self):
        mail, alone = _child.Mail(), self.program()
        reader, computer = self.program(data_workers=2, eval=Data(words)), self.program(data_workers=2, eval=Data(words))
        mail.deliver(reader, 1)
        mail.deliver(computer, 0)
        own = []
        for read in (computer.data, computer.eval):
            read.read = lambda key, read=read.read: own.append(key) or read(key)
        for source, other, number in ((reader.data, computer.data, 0), (reader.eval, computer.eval, 1)):
            rows = torch.stack([source.packed(i, 7 + i)[0] for i in (2, 5, 3)])
            want = torch.stack([alone.data.packed(i, 7 + i)[0] for i in (2, 5, 3)])
            self.assertEqual((len(source.kept), own), (0, []))
            if number == 0:
                for side in (0, 1):
                    for a, b in zip(other.unpack(rows, side), alone.data.unpack(want, side)):
                        self.assertTrue(torch.equal(a, b))
            else:
                other.unpack(rows, 0)
            self.assertEqual(own, [])
        other.unpack(torch.stack([source.packed(i, 1)[0] for i in range(4)]).flip(0), 0)
        self.assertEqual(own, [])
        reader.data.post = lambda key, sample: None  # a process that ends before it has sent
        computer.data.unpack(torch.stack([reader.data.packed(1, 1)[0]]), 0)
        self.assertEqual(own, [(0, 1, 1)])
        for i in range(3000):  # nothing takes them
            mail.post(bytes(24), i)

    def test_part_of_a_large_tensor_is_sent_alone(self):
        whole = torch.arange(1 << 16)
        for part in (whole[5:9], (whole[5:9], 1), {"a": [whole[5:9]]}):
            self.assertLess(len(pickle.dumps(_child.compact(part))), 1000)
        self.assertIs(_child.compact(whole), whole)

    def test_keeps_few(self):
        p = self.program()
        for i in range(100):
            p.data.packed(i % 8, i)
        self.assertEqual(len(p.data.kept), 6 * 4)

    def test_refused(self):
        for text, collate in {
            "Job.collate is an int; give a function": 1,
            "Job.collate returns a Tensor; it must return a pair (inputs, targets)": lambda samples: torch.ones(3),
            "Job.collate returns inputs of shape [7, 4] for 1 samples; the first dimension must count samples": lambda samples: (torch.ones(7, 4), torch.ones(7)),
            "Job.collate returns inputs of [4] of torch.float32 a sample, and [1] of torch.float32 before; shapes must not vary":
                lambda samples: (torch.ones(len(samples), max(len(s["text"]) for s in samples)), torch.ones(len(samples))),
            "what Job.collate returns: the target has a dict": lambda samples: (torch.ones(len(samples), 4), samples[0]),
        }.items():
            with self.subTest(text):
                with self.assertRaises(_describe.Refused) as caught:
                    self.program(collate=collate)
                self.assertIn(text, str(caught.exception))


class Writes(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.inner, self.when = nn.Linear(4, 2), when

    def forward(self, x):
        if self.when:
            self.inner.bias.data.add_(1)
        return self.inner(x)


class Shared(nn.Module):
    """Has two parameters whose gradients autograd makes views of one tensor."""

    def __init__(self):
        super().__init__()
        self.inner, self.a, self.b = nn.Linear(4, 3), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.inner(x) + (self.a[None] + self.b[None])


@mock.patch.dict(os.environ, {_device.COPIES: "1"})
class TestDevice(unittest.TestCase):
    """Layers on the CPU with the copies that a GPU needs."""

    def test_same_bits(self):
        tied = TestTied()
        for make in (lambda: program(layers=lambda: [Start(), Middle(), End()], loss=several_loss, data=Data(several)), tied.program, TestCollate().program):
            p = make()
            with mock.patch.dict(os.environ):
                del os.environ[_device.COPIES]
                plain = make()
            self.assertEqual((p.device.copies, plain.device.copies, p.probe), (True, False, plain.probe))
            self.assertEqual((p.describe()["identity"]["device"], plain.describe()["identity"]["device"]), ("cpu with copies", ""))
            w, other = Worker(p), Worker(plain)
            for borders in [(), (1,), (2,), (1, 2)]:
                self.assertEqual(w.run(borders), other.run(borders), borders)

    def test_parameters_are_copied_when_they_change(self):
        p = program()
        w = Worker(p)
        before = w.run(())
        where = p.layers[0].held[0].data_ptr()
        there = torch.frombuffer(w.all, dtype=torch.float32, count=10, offset=w.params[0])
        old = there.clone()
        there.add_(1)
        w.values -= 1  # so the number stays
        self.assertEqual(w.run(()), before)
        self.assertNotEqual(w.run(()), before)
        self.assertEqual(p.layers[0].params[0].data_ptr(), where)
        there.copy_(old)
        w.values = -1  # then the number is 0: anything may be there
        self.assertEqual(w.run(()), before)

    def test_writing_to_parameters(self):
        writes, said = [], "layer 0.Writes writes to its parameters"
        w = Worker(program(layers=lambda: [Writes(writes)]))
        w.run(())
        writes.append(1)
        w.run(())
        with self.assertRaises(_describe.Refused) as caught:  # when the next step brings other values
            w.run(())
        self.assertIn(said, str(caught.exception))
        with self.assertRaises(_process.Elsewhere) as caught:  # of the probe
            program(layers=lambda: [Writes(writes)])
        self.assertIn(said, str(caught.exception))

    def test_sums_of_gradients(self):
        p = program(layers=lambda: [Shared(), nn.Tanh(), nn.Linear(3, 2)])
        w = Worker(p)
        each = []
        for i, merges in enumerate(([], [0, 1], [], [2, 3, 0, 2])):  # the sums over two, and of these
            _, _, found = w.run((1,), samples=2, offset=2 * i)
            each.append([torch.frombuffer(bytearray(found[layer]), dtype=torch.float32) for layer in (0, 2)])
            w.run((1,), samples=2, offset=2 * i, slot=i + 1, merges=merges)
        self.assertEqual(sorted(w.computer.kept), [(0, 0), (1, 0), (2, 0)])
        for k, layer in enumerate((0, 2)):
            at, a = w.take(100), [grads[k] for grads in each]
            w.computer.hand_over(layer, 0, at)
            self.assertTrue(torch.equal(torch.frombuffer(w.all, dtype=torch.float32, count=len(a[0]), offset=at), (a[0] + a[1]) + (a[2] + a[3])))
        w.computer.forget(1, 3)
        self.assertEqual(sorted(w.computer.kept), [(0, 0)])
    def test_trying_in_another_process(self):
        class Ends(nn.Module):
            def __init__(self, how):
                super().__init__()
                self.inner, self.how = nn.Linear(4, 2), how

            def forward(self, x):
                self.how()
                return self.inner(x)

        def out_of_memory():
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, this process has 1 GiB in use.")

        for text, how in {
            "the Python process that runs the probe exited with status 3": lambda: os._exit(3), "exited with SIGKILL": lambda: os.kill(os.getpid(), 9), "it called sys.exit(4)": lambda: exit(4),
            'in Forward of layer "0.Ends": RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB; give a smaller Job.micro_batch, or fewer workers for each GPU (': out_of_memory,
        }.items():
            with self.subTest(text):
                with self.assertRaises(_process.Elsewhere) as caught:
                    program(layers=lambda: [Ends(how)])
                self.assertIn(text, _describe.explain(caught.exception, "")["text"])

    def test_trying_is_repeated_when_it_is_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            def killed_twice():
                if len(os.listdir(folder)) < 2:
                    tempfile.mkstemp(dir=folder)
                    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSTOP)[len(os.listdir(folder)) - 1])
                return 7

            self.assertEqual(_process.in_child("is killed", killed_twice, None), 7)
            self.assertEqual(len(os.listdir(folder)), 2)

    def test_trying_forks(self):
        ours, theirs = os.pipe()

        def forks():
            if os.fork() == 0:
                os.close(theirs)
                os.read(ours, 1)  # outlives the process that forks it
            return 7

        self.assertEqual(_process.in_child("forks", forks, None), 7)
        os.close(ours)
        os.close(theirs)

    def test_chosen(self):
        for text, device in {'Job.device is "cuda", and PyTorch': "cuda", "Job.device is 'cuda:1'; give": "cuda:1", "Job.device is 7; give": 7}.items():
            with self.subTest(text), mock.patch.object(_device, "count_gpus", lambda explain: 0), self.assertRaises(_describe.Refused) as caught:
                program(device=device)
            self.assertIn(text, str(caught.exception))
        with mock.patch.dict(os.environ):
            del os.environ[_device.COPIES]
            self.assertEqual(program(device="cpu").describe()["identity"]["device"], "")

    def test_cuda_before_training(self):
        lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.1)
        for text, begun, layers in (("the program uses CUDA before training begins", True, [nn.Linear(4, 2)]), ("is a LSTM with dropout", False, [lstm])):
            with self.subTest(text), mock.patch.object(_device, "count_gpus", lambda explain: 1), \
                    mock.patch.object(torch.cuda, "is_initialized", lambda: begun), self.assertRaises(_describe.Refused) as caught:
                program(layers=layers, device="cuda")
            self.assertIn(text, str(caught.exception))

    def test_gpu(self):
        """What a GPU is asked for, with the CPU in its place."""
        plain, cuda, cpu = program(device="cpu"), torch.cuda, torch.device("cpu")
        generator, cudart = torch.Generator(), mock.MagicMock()
        cudart().cudaHostRegister.return_value = 0
        properties = types.SimpleNamespace(name="GPU", major=9, minor=0)
        with contextlib.ExitStack() as stack:
            for where, name, value in (
                (_device, "count_gpus", lambda explain: 2), (torch, "device", lambda *_: cpu), (torch.version, "cuda", "12.1"), (cuda, "init", lambda: None), (cuda, "set_device", lambda index: None),
                (cuda, "default_generators", [generator, generator]), (cuda, "Stream", mock.MagicMock),
                (cuda, "stream", lambda stream: contextlib.nullcontext()), (cuda, "current_stream", mock.MagicMock()), (cuda, "Event", mock.MagicMock()), (cuda, "cudart", cudart),
                (cuda, "get_device_properties", lambda index: properties),
                (_describe, "GENERATORS", list(_describe.GENERATORS)),
            ):
                stack.enter_context(mock.patch.object(where, name, value, create=True))
            p = program(device="cuda")
            told = p.describe()["identity"]["device"]
            self.assertRegex(told, r"^GPU, capability 9\.0, CUDA 12\.1, cuDNN \S+, cuBLAS :4096:8, TF32 in (nothing|products|convolutions)")
            self.assertEqual((p.probe, Worker(p).run(())), (plain.probe, Worker(plain).run(())))
            _describe.seed(77)
            self.assertEqual(generator.initial_seed(), 77)
            file = os.memfd_create("memory")
            os.ftruncate(file, 4096)
            locked = cuda.cudart().cudaHostRegister
            memory = _device.LockedMemory(file)
            locked.reset_mock()
            for at, words in ((1 << 20, 1 << 14), (1 << 20, 1 << 14), (1 << 21, (1 << 14) + 1), (1 << 22, 1 << 13), ((1 << 23) + 64, 1 << 14)):
                memory.lock(at, words)
            memory.lock((1 << 21) + (1 << 16), 1 << 14)  # a part of a block
            self.assertEqual([(c.args[0] - memory.base, c.args[1]) for c in locked.mock_calls], [(1 << 20, 1 << 16), (1 << 21, 1 << 17)])
            p.device.claim.close()
        torch.use_deterministic_algorithms(True, warn_only=True)

    def test_gpus_are_shared_evenly(self):
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": f"a test {os.getpid()}"}):
            held = [_device.claim(2) for _ in range(5)]
            self.assertEqual([index for index, _ in held], [0, 1, 0, 1, 0])
            held[1][1].close()
            held.append(_device.claim(2))
            self.assertEqual(held[-1][0], 1)
            for _, place in held:
                place.close()


class TestCheckpoint(unittest.TestCase):
    def test_same_bits(self):
        def layers(wrap):
            return lambda: [nn.Linear(4, 8), wrap(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(inplace=True))), nn.Linear(8, 2)]

        with_it, without = program(layers=layers(soliton.checkpoint)), program(layers=layers(lambda m: m))
        self.assertEqual(with_it.probe, without.probe)
        self.assertEqual(Worker(with_it).run((2,)), Worker(without).run(()))

    def test_keeps_no_graph(self):
        p = program(layers=lambda: [nn.Linear(4, 8), soliton.checkpoint(nn.Linear(8, 2))])
        _, kept = p.layers[1].forward([torch.randn(4, 8)], True, 1)
        self.assertIsNone(kept[1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.head.register_buffer("mask", torch.ones(2))


class TestStart(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def save(self, state):
        path = os.path.join(self.folder, "state.pt")
        torch.save(state, path)
        return path

    def begin(self, path):
        m = Model()
        return program(layers=[m.body, m.head], model=m, init_from=path)

    def test_values_and_buffers(self):
        m = Model()
        m.head.mask[0] = 7
        for state in (m.state_dict(), {"state_dict": m.state_dict(), "epoch": 3}):
            p = self.begin(self.save(state))
            self.assertTrue(torch.equal(p.layers[0].first[0], m.body.weight.detach()))
            self.assertEqual(p.layers[1].module.mask.tolist(), [7, 1])

    def test_names_of_layers(self):
        m = Model()
        path = self.save({"0.weight": m.body.weight, "0.bias": m.body.bias, "1.weight": m.head.weight, "1.bias": m.head.bias})
        p = program(layers=[nn.Linear(4, 3), nn.Linear(3, 2)], init_from=path)
        self.assertTrue(torch.equal(p.layers[1].first[1], m.head.bias.detach()))

    def test_safetensors(self):
        header, words = {}, b""
        for name, t in Model().state_dict().items():
            header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(words), len(words) + 4 * t.numel()]}
            words += struct.pack(f"<{t.numel()}f", *range(t.numel()))
        path = os.path.join(self.folder, "model.safetensors")
        text = json.dumps(header).encode()
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + words)
        self.assertEqual(self.begin(path).layers[0].first[1].tolist(), [0, 1, 2])
        with open(path, "r+b") as f:
            f.truncate(len(text) + 20)
        with self.assertRaisesRegex(_describe.Refused, "is not within the file; give a run directory"):
            self.begin(path)

    def test_no_code_is_run(self):
        class Evil:
            def __reduce__(self):
                return open, (os.path.join(folder, "written"), "w")

        folder = self.folder
        with self.assertRaisesRegex(_describe.Refused, "--init-from .* cannot be read"):
            self.begin(self.save({"body.weight": Evil()}))
        self.assertEqual(os.listdir(folder), ["state.pt"])

    def test_refused(self):
        state = Model().state_dict()
        for text, change in {
            "has more, which the model does not have; it has body.weight, body.bias, head.weight": {"more": torch.ones(1)},
            "has body.bias of shape [4], and the model [3]": {"body.bias": torch.ones(4)},
            "has an int as body.bias": {"body.bias": 1},
        }.items():
            with self.subTest(text), self.assertRaises(_describe.Refused) as caught:
                self.begin(self.save({**state, **change}))
            self.assertIn(text, str(caught.exception))
        del state["head.bias"]
        with self.assertRaisesRegex(_describe.Refused, "lacks head.bias, which the model has"):
            self.begin(self.save(state))


class Flaky(torch.utils.data.Dataset):
    """Numbers, of which the first reads of some fail."""

    def __init__(self):
        self.failed = set()

    def __len__(self):
        return 40  # more of them fail than one read is tried again

    def __getitem__(self, i):
        if i % 3 == 0 and i not in self.failed:
            self.failed.add(i)
            raise OSError("transient")
        return torch.randn(4), torch.tensor(i % 2)


class TestTransientErrors(unittest.TestCase):
    def test_read_again(self):
        _describe.PAUSES, pauses = (0, 0, 0, 0), _describe.PAUSES
        self.addCleanup(setattr, _describe, "PAUSES", pauses)
        collate = torch.utils.data.default_collate
        for make in (_describe.Source, lambda data, what: _describe.Collated(data, what, collate, 8)):
            for read in (lambda s: s.sha256(), lambda s: [[t.tolist() for t in side] for side in s.batch(30)]):
                flaky, steady = Flaky(), Flaky()
                steady.failed.update(range(40))
                self.assertEqual(read(make(flaky, "data")), read(make(steady, "data")))
        torn = Flaky()
        torn.failed = ()  # so that each read of them fails
        with self.assertRaises(AttributeError):
            _describe.Source(torn, "data")


class TestFirstValues(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = os.path.join(self.folder, "values.pt")

    def made(self, seed, width=2, **given):
        torch.manual_seed(seed)
        layer = nn.Linear(4, width)
        layer.register_buffer("mask", torch.rand(3) > 0.5, persistent=False)
        return _describe.Program(job(layers=[layer], **given), "/", first=self.path)

    def test_all_have_those_of_the_first(self):
        one, other = self.made(1), self.made(2)
        for a, b in ((one.layers[0].params[0], other.layers[0].params[0]), (one.job.layers[0].mask, other.job.layers[0].mask)):
            self.assertTrue(torch.equal(a, b))
        self.assertEqual(one.describe(), other.describe())
        self.assertEqual(sorted(os.listdir(self.folder)), ["values.pt", "values.pt.lock"])

    def test_a_file_that_only_the_first_has(self):
        path = os.path.join(self.folder, "pretrained.pt")
        torch.save({"0.weight": torch.ones(2, 4), "0.bias": torch.zeros(2)}, path)
        self.made(1, init_from=path)
        os.remove(path)
        self.assertTrue(torch.equal(self.made(2, init_from=path).layers[0].params[0], torch.ones(2, 4)))

    def test_refused(self):
        self.made(1)
        with self.assertRaisesRegex(_describe.Refused, "0.(weight|bias) is not the same tensor in all processes"):
            self.made(1, width=3)
        for wrong in (b"", b"no file of torch", pickle.dumps([1])):
            with open(self.path, "wb") as f:
                f.write(wrong)
            with self.assertRaisesRegex(_describe.Refused, "first values of the run, .* cannot be read"):
                self.made(1)


class TestLoad(unittest.TestCase):
    def test_shared_names_of_a_go_model(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        header = json.dumps({"table": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}).encode()
        with open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
        for config in ({"model": "gpt", "config": {"tied": True}, "tied": {"head": "table"}}, {"config": {"tied": {"head": "table"}}}):
            with open(os.path.join(folder, "config.json"), "w") as f:
                json.dump(config, f)
            state = soliton.load(folder)
            self.assertIs(state["head"], state["table"])
            self.assertEqual(state["head"].tolist(), [[1], [2]])


class TestBeginning(unittest.TestCase):
    def test_bound(self):
        said = _child.Beginning(10)
        for _ in range(3):
            print("four", file=said)
        self.assertEqual(said.text.getvalue(), "four\nfour\n")


class TestSources(unittest.TestCase):
    def test_what_other_machines_get(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for name in ("venv/pyvenv.cfg", "run/job.json"):
            os.makedirs(os.path.dirname(os.path.join(folder, name)))
            open(os.path.join(folder, name), "w").close()
        for name, part in {"train.py": True, "inner/data.py": True, "data.txt": False, ".cache/soliton/x.py": False, "venv/lib/x.py": False,
                           "lib/site-packages/x.py": False, "run/first/program/x.py": False}.items():
            self.assertEqual(_describe.is_source(os.path.join(folder, name), folder), part, name)
        self.assertFalse(_describe.is_source(folder + "-other/train.py", folder))
        self.assertFalse(_describe.is_source(_describe.__file__, os.path.dirname(_describe.PACKAGE)))


class TestOptimizer(unittest.TestCase):
    def test_rates(self):
        p = program(optimizer=soliton.SGD(lr=lambda step: 1 / step))
        self.assertEqual(p.describe()["schedule"], {"kind": "table", "rates": [1, 1 / 2, 1 / 3]})
        p = _describe.Program(job(optimizer=soliton.SGD(lr=lambda step: torch.tensor(step / 2))), "/", rates=2)
        self.assertEqual(p.describe()["schedule"]["rates"], [0.5, 1])

    def test_groups(self):
        m = nn.Linear(4, 2)
        p = program(layers=[m], param_groups=[{"params": [m.bias], "lr_scale": 0.5, "weight_decay": 0}, {"params": m.weight, "weight_decay": 0.25}])
        weight, bias = p.describe()["layers"][0]["params"]
        self.assertEqual((weight["decay"], weight["lr_scale"], weight["weight_decay"]), (True, 1, 0.25))
        self.assertEqual((bias["decay"], bias["lr_scale"], bias["weight_decay"]), (False, 0.5, 0))
        self.assertNotEqual(p.describe()["identity"]["tuning_sha256"], "")
        self.assertEqual(program().describe()["identity"]["tuning_sha256"], "")


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return x


class TestRefused(unittest.TestCase):
    def test_each_by_name(self):
        shared = nn.Linear(4, 4)
        for text, given in {
            "Job.layers is empty": {"layers": []},
            "Job.layers[0] is a str": {"layers": ["x"]},
            "weight of layer 0 (Linear) is torch.float64": {"layers": [nn.Linear(4, 2).double()]},
            "has no shape yet": {"layers": [nn.LazyLinear(2)]},
            "is a BatchNorm1d, whose running mean": {"layers": [nn.BatchNorm1d(4), nn.Linear(4, 2)]},
            "changes its buffer seen": {"layers": [Forgetful(), nn.Linear(4, 2)]},
            "layer 0.Returns returns None; a layer must return a tensor, or a tuple of tensors": {"layers": [Returns(lambda x: None)]},
            "layer 0.Returns returns a tuple with a str": {"layers": [Returns(lambda x: (x, "y"))]},
            "layer 0.Returns returns torch.float64; a layer must return float32 or integers": {"layers": [Returns(lambda x: x.double())]},
            "layer 0.Returns returns shape [] for 4 samples": {"layers": [Returns(lambda x: x.sum())]},
            "sample 0 of Job.data is a dict; give a pair (input, target), or a function Job.collate": {"data": Data(lambda i: {"x": 1})},
            "Job.data is a DataLoader; give its dataset, and its collate_fn as Job.collate": {"data": torch.utils.data.DataLoader(Data(plain))},
            "Job.data is a list_iterator": {"data": iter([1])},
            "the input is torch.float64": {"data": Data(lambda i: (torch.randn(4).double(), 1))},
            "sample 1 of Job.data: the input is [5] of torch.float32, that of sample 0 is [4] of torch.float32": {"data": Data(lambda i: (torch.randn(4 + i), 1))},
            "Job.loss returns a str": {"loss": lambda out, target: "x"},
            "the loss of the first 4 samples is nan": {"loss": lambda out, target: out.sum() * float("nan")},
            "Job.steps is 1.5; give a whole number": {"steps": 1.5},
            "Job.param_groups[0] is a str": {"param_groups": ["x"]},
            "Job.param_groups[0] has the lr_scale 0; give a number above 0": {"param_groups": [{"params": [], "lr_scale": 0}]},
            "Job.param_groups[0] has the weight_decay -1": {"param_groups": [{"params": [], "weight_decay": -1}]},
            "Job.param_groups[0] has a parameter that no layer has": {"param_groups": [{"params": [nn.Parameter(torch.ones(1))]}]},
            "Job.param_groups[1] has a parameter that an earlier": {"layers": [shared], "param_groups": [{"params": shared.weight}] * 2},
            "the learning rate of step 2 is -1; the function must": {"optimizer": soliton.SGD(lr=lambda step: 3 - 2 * step)},
            "Job.metrics['x'] returns a str; it must return the mean": {"metrics": {"x": lambda out, target: "y"}},
            "Job.metrics has the name 'a b'": {"metrics": {"a b": F.cross_entropy}},
            "lr of Job.optimizer is a str": {"optimizer": soliton.SGD(lr="x")},
            "Job.on_step is an int; give a function": {"on_step": 1},
            "Job.optimizer is an Adam": {"optimizer": torch.optim.Adam([nn.Parameter(torch.ones(1))])},
        }.items():
            with self.subTest(text):
                with self.assertRaises(_describe.Refused) as caught:
                    program(**given)
                self.assertIn(text, str(caught.exception))


class Recurrent(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.inner = kind(width, 8, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x):
        return self.inner(x)[0]


class TestTypicalModels(unittest.TestCase):
    def test_bits_do_not_depend_on_stages(self):
        def convolutions():
            def block(a, b):
                return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            return [block(3, 4), block(4, 8), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 2))]

        for layers, make, loss in [
            (convolutions, lambda i: (torch.randn(3, 8, 8), i % 2), nn.CrossEntropyLoss()),
            (lambda: [Recurrent(nn.GRU, 1), Recurrent(nn.LSTM, 8), nn.Linear(8, 1)], lambda i: (torch.randn(5, 1), torch.randn(5, 1)), F.mse_loss),
        ]:
            p = program(layers=layers, data=Data(make), loss=loss)
            want = Worker(p).run(borders=())
            for borders in [(1,), (2,), (1, 2)]:
                self.assertEqual(Worker(p).run(borders), want, borders)


class TestExplain(unittest.TestCase):
    def test_names_the_call(self):
        wrong = lambda *given: torch.ones(2) @ torch.ones(3)  # noqa: E731
        for text, given in {
            'in Forward of layer "1.Linear": RuntimeError: mat1 and mat2': {"layers": [nn.Linear(4, 3), nn.Linear(4, 2)]},
            "in the loss: RuntimeError: ": {"loss": wrong},
            "in Job.collate: RuntimeError: ": {"collate": wrong},
        }.items():
            with self.assertRaises(RuntimeError) as caught:
                program(**given)
            self.assertIn(text, _describe.explain(caught.exception, "/nowhere")["text"])


if __name__ == "__main__":
    unittest.main()
