// Package data reads training data that is larger than memory: text, tokens as nanoGPT and NumPy write them, documents that it
// tokenizes and packs, images, and WebDataset's tar shards, from files, folders and patterns, plain or compressed (.gz, .zst), alone or
// mixed by weight. docs/data.md has examples.
//
//	prose, err := data.Tokens(data.Uint16, "prose/*.bin")
//	code, err := data.Numpy("code/*.npy")
//	job.Data = data.Mix{Seed: 1, Parts: []data.Part{{Data: prose, Weight: 0.7}, {Data: code, Weight: 0.3}}}
//
// Each is a [trainer.Dataset] with a Bind method, so a job takes it as it is. A sample is a pure function of the files, the
// configuration, the epoch and its index: any worker may read any sample at any time. Like every data set, it is for one goroutine at
// a time.
//
// # Memory
//
// A sample is read from its place in the files, and nothing else is kept but names, sizes and up to 64 open files. The system keeps
// what was read in its page cache, which all workers of a host share. Files are read, not mapped: a disk that fails, or a file that
// another program cuts off, is an error of one sample, which the run tries again, and not the end of the process.
//
// # Prepared files
//
// Compressed files cannot be read in the middle. They are unpacked once: the first process of a host that opens one writes the plain
// bytes, and others wait and use them. The tokens of documents, and where packing puts documents, are prepared likewise. Prepared files are in the folder soliton/data of [os.UserCacheDir] ($XDG_CACHE_HOME, else
// ~/.cache on Linux), under a name that follows from path, size and modification time. Removing the folder is safe while no run
// uses it.
//
// # Fingerprint
//
// The fingerprint covers every byte of up to 1024 files of up to 64 MiB together, unpacked. Beyond, so that a terabyte starts in
// seconds, it covers the number and the sizes of all files and 1024 pieces at even distances, each of 16 KiB, or of eight files where
// these are smaller. It does not see a change between these pieces that keeps all sizes. One process of a host
// makes the fingerprint of up to 1024 files and keeps it with the prepared files, as long as inodes, sizes and times of change stay.
package data
