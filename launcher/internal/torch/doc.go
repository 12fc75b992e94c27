// Package torch trains jobs whose layers are PyTorch modules.
//
// Each worker is a Go process, which runs the worker of package trainer, with one Python process at its side. The Go process owns
// parameters, sums of gradients, the reduction, the optimizer, the order of the data and the commit; the Python process computes the
// passes of layers and the loss, and reads samples. Both see a shared memory without a name: parameters and inputs, which Python
// maps without the right to write, and what Python makes. What is in it outlives the Python process.
//
//   - package.go: the Python package soliton, embedded and unpacked;
//   - pack.go: the program's own files, packed for other machines;
//   - gpus.go: how many workers a program has on a machine with GPUs;
//   - values.go: the program on this machine, and its first values;
//   - worker.go: the worker program, its flags, and the job made of the program's description;
//   - program.go: the Python processes: start, replacement, requests and replies;
//   - memory.go: the shared memory;
//   - output.go: what the Python processes print;
//   - stage.go: the stage that the engine runs;
//   - kept.go: gradients that the Python process keeps on a GPU.
//
// # Processes
//
// The worker starts one Python process, which imports the program, makes the job, runs a micro-batch as a probe and describes all of
// it. That process computes nothing else: it forks the one that computes, so that another can take its place within milliseconds. If
// the computing process exits, its passes in flight are computed again from their inputs, which are in the shared memory, to the same
// bits. If the first process exits, it is started again, and must describe the same job.
//
// # Devices
//
// With a GPU, the computing process has copies of the parameters there. [engine.Micro.Values] numbers their values, so that it copies them when
// they change. Gradients stay on the GPU until the last pass of a step; see kept.go. A process that uses CUDA cannot fork others that do, so
// the first process uses none: forked processes count the GPUs and run the probe. python/soliton/_device.py has what differs, and makes
// the same copies on the CPU for tests.
//
// # Bits
//
// A layer is called for one micro-batch, with a contiguous leaf as its input, whatever the stages are; its gradients come from one
// backward pass into empty .grad. Before each call all generators are seeded from the job's streams. So a result depends on the
// layer, the micro-batch and PyTorch's own kernels only. What decides those is part of the job (Config), and the probe shows that it
// is the same on all workers.
//
// # Concurrency
//
// The goroutine that computes sends requests and reads replies. The one that calls OnStep and OnEnd does, too, while no pass runs; a
// lock keeps them apart. One goroutine copies what the processes print, from the start of the program to its end.
package torch
