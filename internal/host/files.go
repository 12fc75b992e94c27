package host

import (
	"context"
	"errors"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// commitFiles makes a checkpoint whole, and removes those that are not needed any more.
func commitFiles(ctx context.Context, dir string, m checkpoint.Manifest, post func(session.Event) bool) {
	err := checkpoint.Commit(dir, m)
	if !post(session.CheckpointCommitted{Step: m.Step, Err: err}) {
		return
	}
	e := session.CheckpointsPruned{}
	if err == nil {
		e.Err = checkpoint.Prune(ctx, dir, checkpoint.DefaultKeep, m.Step+1)
	}
	post(e)
}

// verifyFiles finds the newest whole checkpoint before a plan that goes on from one is proposed.
func verifyFiles(ctx context.Context, dir, job string, p session.Propose) session.CheckpointVerified {
	v := session.CheckpointVerified{Propose: p}
	r, refused, err := checkpoint.Newest(ctx, dir, job)
	for _, fault := range refused {
		if !errors.Is(fault, checkpoint.ErrUnfinished) {
			v.Refused = append(v.Refused, session.OneLine(fault.Error())+"; the checkpoint is not used")
		}
	}
	switch {
	case err == nil:
		v.Step = r.Manifest().Step
		_ = r.Close()
	case !errors.Is(err, checkpoint.ErrNone):
		v.Err = err
	}
	return v
}
