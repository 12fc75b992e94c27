// Package checkpoint writes the state of a job at one step to disk, and reads
// it back under any layout.
//
// In the run directory:
//
//	checkpoints/step-NNNNNNNN/         the state after that many steps
//	  plan-G.N-worker-W.safetensors    the shards that worker W owned under plan G.N
//	  manifest.json                    what belongs to the checkpoint ([Manifest])
//
// A file of shards holds, for each shard [lo,hi) of layer L, one-dimensional
// float32 tensors: "layer.L/params[lo:hi]" and one for each moment of the
// rule, "layer.L/exp_avg[lo:hi]" and "layer.L/exp_avg_sq[lo:hi]" for adamw,
// "layer.L/momentum[lo:hi]" for sgd. Ranges count elements of the layer's
// flattened parameters. Any safetensors library reads it.
//
// The checkpoint of a step is made so:
//
//	file, err := checkpoint.Write(ctx, dir, part)   // every owner, side by side
//	err = checkpoint.Commit(dir, manifest)          // one of all, with the files of all
//	err = checkpoint.Prune(ctx, dir, 3, step+1)     // now and then
//
// and used so:
//
//	r, refused, err := checkpoint.Newest(ctx, dir, job.Eras())
//	defer r.Close()
//	err = r.Read(ctx, layer, lo, hi, params, moments)
//
// # What a crash leaves
//
// Each file is written under a temporary name, which begins with a dot, synced,
// renamed, and its directory synced; the manifest comes last. The names of files
// hold the version of the plan, which is used once, so that no file is ever
// replaced by another; only a manifest may be, by one of the same step. So at any
// moment a directory with a manifest is a whole checkpoint, and one without it is
// none. Pruning removes the manifest first.
//
// # What is refused
//
// Files on disk are not trusted. A manifest is used only if it is,
// byte for byte, as this package writes it, its own digest included; its files only
// if their sizes and SHA-256 are those it states. Faults are of type [*Error] and
// name the file. Memory is bounded by the buffers of the caller, the manifest
// ([MaxManifest]) and the headers of the files.
//
// # Concurrency and cancellation
//
// All functions may run concurrently, in several processes, except that [Prune]
// must not run while a step before the one it is given is written. Methods of a
// [Reader] other than Close are safe for concurrent use. Functions that take a
// context return its error soon after it is done.
//
// # Limitations
//
// Where the files of a checkpoint lie on several machines, its manifest says so, and each has the manifest and some
// of the files: [Holdings], [Has], [Receive] and [OpenFile] are for hosts that fetch them from each other. A checkpoint is
// whole to [Newest] only where all files are. Data is hashed on its way to the kernel; damage on
// the disk is detected when the file is read.
package checkpoint
