"""The job of bench bridge under Soliton. After each step it tells the bench, and after each turn of steps it waits for it."""

import socket
import time

import soliton

import torch_bridge_model as model

CONNECTION = []


def job(args):
    o = model.options(args)

    def on_step(s):
        if not CONNECTION:
            CONNECTION.append(socket.socket(socket.AF_UNIX))
            CONNECTION[0].connect(o.talk)
        CONNECTION[0].sendall(f"{s.step} {time.monotonic_ns()}\n".encode())
        if s.step % o.turn == 0:
            CONNECTION[0].recv(1)

    return soliton.Job(
        layers=model.layers(o), loss=model.loss, data=model.Bytes(o.context), optimizer=soliton.AdamW(lr=1e-3, weight_decay=0.1),
        device=o.device, global_batch=o.batch, micro_batch=o.micro, steps=10, clip_norm=1.0, seed=1, on_step=on_step if o.talk else None)


soliton.main(job)
