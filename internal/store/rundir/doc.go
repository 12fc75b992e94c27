// Package rundir owns the files of a run directory.
//
//	job.json       what decides the result, and what it ran on ([Job])
//	data.json      the data files with sizes and SHA-256 ([DataFile])
//	plans.jsonl    one line for each plan: which worker does what, and why ([Plan])
//	traces.jsonl   spans of recoveries and of some steps, as OTLP JSON (package trace)
//	metrics.jsonl  one line for each committed step ([Metrics])
//	events.jsonl   one line for each change ([Event])
//	skips.jsonl       one line for each sample that was skipped ([Skip])
//	deliveries.jsonl  one line for each call of OnStep that has returned ([Delivery])
//	workers.json   the processes, while the run is under way ([Workers])
//	summary.json   how the run ended ([Summary])
//	checkpoints/   states of the job, see package internal/store/checkpoint
//	agreement/     the log of what the agents agreed on, see package agree
//	first/         first values of a Python program, with which all its processes begin
//	log/           what worker W in incarnation I printed: worker-W.I.log
//	log/others.log what workers on all machines printed in the end ([Others]), where each has a run directory
//	bin/           the program, while it runs, where the launcher built it
//	lock           locked with flock(2) by the process that owns the run
//
// The worker adds config.json and model.safetensors.
//
// A whole file appears under its name only when it is complete and synced; a line
// file is written one whole line at a time. So whenever the owner dies, what
// lies in the directory is valid.
//
// Line files hold numbers as the shortest decimal that reads back as the same
// float64.
//
// A [Dir] may be used by several goroutines. [Read] reads what others write.
package rundir
