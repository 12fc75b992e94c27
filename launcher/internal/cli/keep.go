package cli

import (
	"cmp"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// KeepFlags add the flags that say which checkpoints stay.
func KeepFlags(flags *pflag.FlagSet, k *checkpoint.Keep) {
	flags.IntVar(&k.Newest, "keep", checkpoint.DefaultKeep, "newest checkpoints that are kept")
	flags.DurationVar(&k.Every, "keep-every", 0, "also keep the first checkpoint of each such time, such as 1h; 0: none")
	flags.StringVar(&k.Best, "keep-best", "", "also keep the checkpoint with the least `MEASURE`: val_loss or loss of its step, or none")
}

// KeepFaults are what is wrong with their values.
func KeepFaults(k checkpoint.Keep, given func(flag string) bool) (errs faults.List) {
	errs.If(k.Newest < 1, "--keep %d: give at least 1", k.Newest)
	errs.If(k.Every < 0, "--keep-every %v: give a positive time, or 0 for none", k.Every)
	errs.If(!checkpoint.Measured(k.Best) || k.Best == "" && given("keep-best"), "--keep-best %s: give val_loss, loss or none", faults.Value(k.Best))
	return errs
}

// InheritKeep takes over from the run before what was not changed.
func InheritKeep(k *checkpoint.Keep, job rundir.Job, changed func(flag string) bool) error {
	every, err := time.ParseDuration(cmp.Or(job.KeepEvery, "0s"))
	if err != nil {
		return fmt.Errorf("keep_every is %q: give a time such as 1h", job.KeepEvery)
	}
	if !changed("keep") {
		k.Newest = cmp.Or(job.Keep, checkpoint.DefaultKeep)
	}
	if !changed("keep-every") {
		k.Every = every
	}
	if !changed("keep-best") {
		k.Best = job.KeepBest
	}
	return nil
}
