"""Processes beside the one that makes the job. PyTorch need not be there."""

import ctypes
import os
import pickle
import select
import signal
import time

PR_SET_PDEATHSIG = 1
STARTS = 3
LOOK_EVERY = 0.1  # seconds
STOP_GRACE = 1.0  # seconds for a stopped process to continue
FAULTS = signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP  # of the process itself


def end_with(parent):
    """Has the kernel end this process with its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class Elsewhere(Exception):
    """An exception of another process; said is what explain has made of it there."""

    def __init__(self, said):
        super().__init__(said["text"])
        self.said = said


def in_child(does, work, explain):
    """Returns what work returns in a process of its own; does says what that is in errors. Its exceptions become Elsewhere.

    A process that is killed from outside, or is stopped for a second, is replaced, twice at most.
    """
    for _ in range(STARTS):
        text, status = start(work, explain)
        if text:
            done, said = pickle.loads(text)
            if done:
                return said
            raise Elsewhere(said)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) in FAULTS:
            break
    how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    raise Elsewhere({"text": f"the Python process that {does} exited with {how}", "trace": "", "refused": False})


def start(work, explain):
    """Returns what a process of its own says of work, pickled, and its status."""
    me = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        end_with(me)
        os.close(reader)
        me = os.getpid()
        try:
            said = True, work()
        except BaseException as error:  # a layer that calls sys.exit is at fault, too
            said = False, explain(error)
        if os.getpid() != me:
            os._exit(0)  # work has forked, and returned from both processes
        with open(writer, "wb") as f:
            pickle.dump(said, f)
        os._exit(0)
    os.close(writer)
    text, stopped, status = b"", None, None
    while status is None:
        if select.select([reader], [], [], LOOK_EVERY)[0]:
            part = os.read(reader, 1 << 20)
            text += part
            if not part:
                time.sleep(LOOK_EVERY / 100)  # it is about to exit
        pid, how = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid and os.WIFSTOPPED(how):
            stopped = time.monotonic()
        elif pid and os.WIFCONTINUED(how):
            stopped = None
        elif pid:
            status = how
        if status is None and stopped is not None and time.monotonic() - stopped > STOP_GRACE:
            os.kill(child, signal.SIGKILL)
    os.set_blocking(reader, False)  # processes that work has started may hold the other end
    with open(reader, "rb") as f:
        return text + (f.read() or b""), status
