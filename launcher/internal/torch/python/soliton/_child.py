"""The Python side of a worker: python -m soliton._child SOCKET MEMORY LOG.

The process that the worker starts imports the program and makes the job. For each process it is asked for, which computes or reads
samples, it forks, so that a new one is there within milliseconds when one was killed. Requests and replies are frames: their length, a kind, and numbers
of 64 bits; replies come in the order of the requests. Tensors are in the shared memory; requests say where.

Standard output and error are a pipe, of which the worker keeps the beginning. Crashes are reported to the log itself.
"""

import collections
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import types
import warnings

from soliton._process import end_with

SETUP, FORK, FIRST, SAMPLE, FORWARD, BACKWARD, LOSS, DROP, SUSPECT, ON_STEP, ON_END, FILES, HAND_OVER, FORGET = range(1, 15)
DONE, FAILED, LOOKS = 0, 1, 2
HEADER = struct.Struct("<IB")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_TEXT = 1 << 19  # of a reply
LOOK = 0.0001  # seconds between looks at how far the device has come


def read(conn, n):
    parts = []
    while n > 0:
        part = conn.recv(n)
        if not part:
            os._exit(0)  # the worker has ended
        parts.append(part)
        n -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def receive(conn):
    size, kind = HEADER.unpack(read(conn, HEADER.size))
    return kind, read(conn, size) if size else b""


def reply(conn, payload, kind=DONE):
    conn.sendall(HEADER.pack(len(payload), kind) + payload)


def fail(conn, said):
    reply(conn, json.dumps(said).encode(), FAILED)


def first_for_want_of_memory():
    """Has the kernel end this process before others when memory runs out: it is the one that can be replaced."""
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
    except OSError:
        pass  # not Linux, or not allowed: another process may go first


def give_way(n):
    """Lets processes that answer have the processor first, as the computing threads of a worker in Go do.

    The process that imports the program does so, too: in a worker that replaces another one it would hold up those that compute.
    """
    try:
        os.nice(n)
    except OSError:
        pass  # not allowed: it competes with them


def keep_memory():
    """Has malloc keep what was freed: each micro-batch needs the same again, and fresh pages cost a fault and zeros each. A user's settings stay."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc
    set_option(M_MMAP_THRESHOLD, 32 << 20)  # the most
    set_option(M_TRIM_THRESHOLD, (1 << 31) - 1)


class Beginning(io.TextIOBase):
    """A stream that keeps the first characters."""

    def __init__(self, most):
        self.most, self.text = most, io.StringIO()

    def write(self, text):
        self.text.write(text[:max(0, self.most - self.text.tell())])
        return len(text)


class Heard:
    """A stream that also keeps the end of what was written, for the reason of an exit."""

    def __init__(self, stream):
        self.stream, self.text = stream, ""

    def write(self, text):
        self.text = (self.text + text)[-4000:]
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class Mail:
    """Brings samples of any type from the processes that read them to the one that makes micro-batches of them.

    A sample is pickled into a file without a name, which crosses with the sample's key. What does not arrive is read again.
    """

    def __init__(self):
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.told = False

    def deliver(self, program, place):
        for source in (program.data, program.eval):
            if source is not None and place:
                source.post = self.post
            elif source is not None:
                source.fetch = self.fetch

    def post(self, key, sample):
        try:
            with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as f:
                pickle.dump(compact(sample), f, pickle.HIGHEST_PROTOCOL)
                f.seek(0)
                socket.send_fds(self.theirs, [key], [f.fileno()])
        except BlockingIOError:
            pass  # nothing is made of samples at the moment
        except Exception as error:
            if not self.told:
                self.told = True
                print(f"soliton: a sample cannot be handed to the process that makes micro-batches, which reads it again: {type(error).__name__}: {error}", file=sys.stderr)

    def fetch(self, size):
        """Returns the samples that have come: their keys, of so many bytes, and the samples pickled."""
        while True:
            try:
                key, files, _, _ = socket.recv_fds(self.ours, size, 1)
            except BlockingIOError:
                return
            if len(key) == size and len(files) == 1:
                with open(files[0], "rb") as f:
                    yield key, f.read()


def compact(value):
    """Returns a sample whose tensors have memory of their own: a part of a large one would be pickled with all of it."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone() if value.numel() * value.element_size() < size_of(value) else value
    if type(value) in (tuple, list):
        return type(value)(map(compact, value))
    if type(value) is dict:
        return {k: compact(v) for k, v in value.items()}
    return value


def size_of(t):
    """Returns the bytes of the memory that a tensor is a part of."""
    return t.untyped_storage().nbytes() if hasattr(t, "untyped_storage") else t.storage().nbytes()


def load(script):
    """Returns the program's code."""
    with open(script, "rb") as f:
        return compile(f.read(), script, "exec")


def look(conn, patterns):
    """Returns the files that match patterns, by their names, with where this machine has them."""
    reply(conn, json.dumps([os.fspath(p) for p in patterns]).encode(), LOOKS)
    found = json.loads(receive(conn)[1])
    if found["error"]:
        raise FileNotFoundError(found["error"])
    return dict(found["files"])


def make(setup, code, conn):
    """Runs the program and returns its job."""
    import soliton

    script = os.path.abspath(setup["script"])
    sys.path[0] = os.path.dirname(script)
    sys.argv = [setup["script"], *setup["args"]]
    makers = []
    soliton._take = makers.append
    soliton._look = lambda patterns: look(conn, patterns)
    from soliton import _describe

    _describe.seed(setup["seed"])
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    if len(makers) != 1:
        raise _describe.Refused(f"{setup['script']} calls soliton.main {len(makers)} times; it must call it once, with the function that makes the job")
    job = makers[0](setup["args"])
    soliton._look = None
    return job


class Computer:
    """Computes passes on a device. It holds the graphs of those in flight, and gradients that a worker leaves here to be added up."""

    def __init__(self, program, memory, device):
        import torch
        from soliton import _describe

        self.torch, self.of, self.program, self.passes = torch, _describe, program, {}
        self.device, self.memory = device, device.memory(memory)
        self.kept = {}  # gradients of the parameters of a layer, and sums of them, by layer and slot
        self.mark = None  # the end of a call, where it is not that of what it has begun to compute

    def batch(self, at, samples, side):
        """Returns the inputs or the targets of a micro-batch, integers in the type that the data set gives."""
        spec = self.program.data.spec(side)
        return [self.device.bring(t) for t in self.program.data.unpack(self.memory.view(at, [samples, *spec["shape"]], spec["integer"]), side)]

    def crossed(self, layer, at, samples):
        """Returns the outputs of a layer, or their gradients, and what crosses behind them, which are in the shared memory."""
        return layer.crossed(self.device.bring(self.memory.view(at, [layer.width(samples)])), samples)

    def install(self, layer, at, values):
        """Lets the parameters of a layer be those in the shared memory. A device keeps its copy while values, their number, is the same."""
        if self.device.copies:
            if layer.values != values or not values:
                self.memory.lock(at, sum(held.numel() for held in layer.held))
                with self.device.aside(behind=False):  # no pass computes with the old ones
                    for held in layer.held:
                        held.copy_(self.memory.view(at, list(held.shape)), non_blocking=True)
                        at += 4 * held.numel()
                self.device.join()
                layer.values, layer.mark = values, layer.sums()
            for p, held in zip(layer.params, layer.held):
                p.data = held
            return
        if layer.at == at and not layer.shares:
            return
        layer.at = at
        for p in layer.params:
            p.data = self.memory.view(at, list(p.shape))
            at += 4 * p.numel()

    def lend(self, layer, state):
        """Hands the values of shared parameters from their owner to the other layers."""
        for p in layer.shares:
            state["carried"][id(p)] = self.of.aligned(p.data)
        for p in layer.borrowed:
            p.data = state["carried"][id(p)]

    def first(self, layer, at):
        self.memory.write(at, self.program.layers[layer].first)

    def sample(self, held_out, index, seed, at_input, at_target):
        source = self.program.eval if held_out else self.program.data
        for at, t in zip((at_input, at_target), source.packed(index, seed)):
            if t.dtype == self.torch.int64 and t.numel() and (int(t.max()) >= 1 << 31 or int(t.min()) < -(1 << 31)):
                raise self.of.Refused("a sample has integers that do not fit into 32 bits")
            self.memory.write(at, [t])

    def forward(self, number, i, first, train, samples, at_input, at_params, seed, at_output, values):
        """Runs a layer; the first one of a stage begins the pass, with the input at at_input. at_output is 0 where the output stays here.

        values numbers the parameters that have been at at_params; 0 means that they may be others than before.
        """
        layer = self.program.layers[i]
        if first and layer.values != values:
            self.of.unwritten(self.program.layers)
        self.install(layer, at_params, values)
        if first:
            self.passes[number] = state = {"train": train, "samples": samples, "layers": {}, "carried": {}, "owed": {}}
            if i == 0:
                x = self.batch(at_input, samples, 0)
            else:
                x, state["carried"] = self.crossed(self.program.layers[i - 1], at_input, samples)
        else:
            state = self.passes[number]
            x = state["out"]
        self.lend(layer, state)
        layer.module.train(bool(train))
        state["out"], kept = layer.forward(x, train, seed)
        if train:
            state["layers"][i] = kept
        if at_output:
            self.memory.write(at_output, [layer.cross(state["out"], state["carried"])])

    def loss(self, number, at_target, seed, at_grad):
        """Computes the loss. at_grad is 0 where its gradient stays here."""
        state = self.passes[number]
        target = self.batch(at_target, state["samples"], 1)
        _, total, count, state["grad"] = self.program.loss(state["out"], target, state["samples"], state["train"], seed)
        if state["train"] and at_grad:
            self.memory.write(at_grad, [self.program.layers[-1].parts.pack(state["grad"])])
        said = struct.pack("<dq", total, count)
        for total, count in self.program.measure(state["out"], target, state["samples"], seed):
            said += struct.pack("<dq", total, count)
        return said

    def backward(self, number, i, last, at_params, seed, at_dout, at_grads, at_din, slot, *merges):
        """Runs the backward pass of a layer, the last one of which ends the pass. at_dout is 0 where the gradient of the output is here.

        at_grads is 0 if the worker does not need the gradients of the parameters. With slot, counted from 1, the gradients stay there. merges are
        pairs of slots: the second slot of each is then added to the first.
        """
        state, layer = self.passes[number], self.program.layers[i]
        self.install(layer, at_params, layer.values)
        if layer.again:
            layer.module.train()
        self.lend(layer, state)
        if at_dout:
            state["grad"], state["owed"] = self.crossed(layer, at_dout, state["samples"])
        state["grad"] = layer.backward(state["layers"].pop(i), state["grad"], seed)
        grads = layer.settle(state["owed"])
        if slot:
            self.kept[i, slot - 1] = grads
            for a, b in zip(merges[::2], merges[1::2]):
                right = self.kept.pop((i, b))
                self.kept[i, a] = [g + r for g, r in zip(self.kept[i, a], right)]  # not in place: gradients may share memory
        elif at_grads:
            self.memory.write(at_grads, grads)
        if at_din:
            self.memory.write(at_din, [self.program.layers[i - 1].cross(state["grad"], state["owed"])])
        if last:
            del self.passes[number]

    def hand_over(self, layer, slot, at):
        """Writes what is in a slot of a layer to the shared memory."""
        with self.device.aside():
            self.memory.write(at, self.kept[layer, slot])
            self.mark = self.device.mark()

    def forget(self, lo, hi):
        """Gives up what layers [lo, hi) have in slots."""
        self.kept = {at: grads for at, grads in self.kept.items() if not lo <= at[0] < hi}

    def suspect(self, number):
        """Returns the first layer of the pass, counted from 1, whose output is not finite, or 0."""
        for i, kept in sorted(self.passes[number]["layers"].items()):
            layer = self.program.layers[i]
            self.lend(layer, self.passes[number])
            if not all(bool(self.torch.isfinite(t.detach()).all()) for t in layer.outputs(kept)):
                return struct.pack("<q", i + 1)
        return struct.pack("<q", 0)

    def on_step(self, told):
        import soliton

        self.program.job.on_step(soliton.Step(told))

    def on_end(self, run):
        """Returns what on_end has printed."""
        said = Beginning(MOST_TEXT)
        with contextlib.redirect_stdout(said):
            self.program.job.on_end(run)
        return said.text.getvalue().encode()[:MOST_TEXT]

    def serve(self, conn, log):
        me = os.getpid()

        def forked():
            conn.close()  # the worker hears of the end of this process by its end of the connection
            end_with(me)

        os.register_at_fork(after_in_child=forked)
        texts = {ON_STEP: self.on_step, ON_END: self.on_end}
        with contextlib.suppress(ImportError):  # PyTorch before 2.2 has none
            from torch.utils import deterministic

            deterministic.fill_uninitialized_memory = False  # it takes time; the probe ran with it
        broken = None
        if self.device.copies:
            try:
                self.program.begin_device()
            except Exception as error:  # such as a GPU without memory left
                broken = error
        calls = {
            FIRST: self.first, SAMPLE: self.sample, FORWARD: self.forward, BACKWARD: self.backward, LOSS: self.loss, SUSPECT: self.suspect,
            HAND_OVER: self.hand_over,
        }
        quiet = {DROP: lambda number: self.passes.pop(number, None), FORGET: self.forget}  # without a reply
        asked = select.poll()
        asked.register(conn, select.POLLIN)
        begun = collections.deque()  # marks of calls that the device may not have done, and what is to be said

        def settle(all):
            """Replies to calls that the device has done, or has to do."""
            while begun and (all or self.device.reached(begun[0][1])):
                began, ended, said = begun.popleft()
                self.device.reach(ended)
                reply(conn, struct.pack("<Q", max(0, self.device.between(began, ended))) + said)

        while True:
            try:
                settle(False)
                if begun and not asked.poll(0):
                    time.sleep(LOOK)
                    continue
                kind, payload = receive(conn)
                numbers = () if kind in texts else struct.unpack(f"<{len(payload) // 8}Q", payload)
                if kind in quiet:
                    quiet[kind](*numbers)
                    continue
                if broken is not None:
                    raise broken
                self.mark, began = None, self.device.mark()
                said = texts[kind](json.loads(payload)) if kind in texts else calls[kind](*numbers)
                ended = self.mark or self.device.mark()
                if os.getpid() != me:
                    os.write(log, b"soliton: the program has forked and returned from both processes; the new one ends\n")
                    os._exit(0)
                begun.append((began, ended, said or b""))
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                sys.stderr.flush()
                if os.getpid() != me:
                    os._exit(1)
                try:
                    settle(True)
                except Exception as earlier:  # the device could not do it
                    error = earlier
                begun.clear()
                fail(conn, self.of.explain(error, self.program.folder))


def main():
    log = int(sys.argv[3])
    faulthandler.enable(log)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    conn = socket.socket(fileno=int(sys.argv[1]))
    memory = int(sys.argv[2])
    parent = os.getppid()
    _, payload = receive(conn)
    setup = json.loads(payload)
    give_way(setup["nice"])
    try:
        code = load(os.path.abspath(setup["script"]))
    except SyntaxError as error:
        fail(conn, {"text": f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})", "trace": "", "refused": True})
        return
    except Exception as error:  # such as a null byte, or parentheses without end
        fail(conn, {"text": f"{type(error).__name__}: {error} ({setup['script']})", "trace": "", "refused": True})
        return
    try:
        import torch  # noqa: F401
    except Exception as error:  # not only ImportError: a library may be missing or broken
        fail(conn, {"text": f"{sys.executable} cannot import torch: {error}; give the interpreter that has it with --python", "trace": "", "refused": True})
        return
    from soliton import _describe, _device

    sys.stdout, sys.stderr = heard = Heard(sys.stdout), Heard(sys.stderr)
    folder = os.path.dirname(os.path.abspath(setup["script"]))
    made = False
    try:
        job = make(setup, code, conn)
        made = True
        program = _describe.Program(job, folder, setup["rates"], setup["init_from"], setup["first"])
        described = json.dumps(program.describe()).encode()
    except BaseException as error:
        said = _describe.explain(error, folder)
        if isinstance(error, SystemExit) and not made:  # later it is a fault of a layer or of the data, as other exceptions are
            said["exit"] = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            words = heard[said["exit"] != 0].text.strip()
            if said["exit"] == 0:
                said["text"] = words
            elif isinstance(error.code, str):
                said["text"] = error.code
            elif words:
                said["text"] = words.splitlines()[-1]
            said["refused"] = True
        sys.stdout.flush()
        fail(conn, said)
        return
    sys.stdout, sys.stderr = heard[0].stream, heard[1].stream
    reply(conn, described)
    me, children = os.getpid(), {}
    mail = Mail() if job.collate is not None and job.data_workers > 0 else None
    while True:
        if os.getppid() != parent:
            return
        # The new connection comes beside the byte that asks for a process.
        asked, files, _, _ = socket.recv_fds(conn, HEADER.size, 1)
        if not asked:
            return
        (place,) = read(conn, HEADER.unpack(asked)[0])  # 0: it computes
        ended = ""
        if children.get(place):
            os.kill(children[place], signal.SIGKILL)
            _, status = os.waitpid(children[place], 0)
            ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        child = children[place] = os.fork()
        if child == 0:
            if mail is not None:
                mail.deliver(program, place)
            end_with(me)
            first_for_want_of_memory()
            keep_memory()
            conn.close()
            device = program.device if place == 0 else _device.CPU()
            Computer(program, memory, device).serve(socket.socket(fileno=files[0]), log)
        os.close(files[0])
        reply(conn, json.dumps({"pid": child, "ended": ended}).encode())


if __name__ == "__main__":
    main()
