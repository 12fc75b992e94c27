package session

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
)

// gathers begins a run that several hosts resume, whose records end at step 2, up to where its checkpoint is looked for.
func gathers(t *testing.T, events ...Event) (*ran, VerifyCheckpoint) {
	again := &Resume{Job: readyOf(0).Job, Data: readyOf(0).Data, Gather: true, Step: 2}
	r := &ran{t: t, s: begin(Config{Settings: Settings{Command: "./gpt", Resume: again}, RunDir: "/runs/a", Shown: "runs/a"}, 2), now: time.Unix(0, 0)}
	r.feed(append(prepare(2), events...)...)
	seeks := pick[VerifyCheckpoint](r.effects)
	if len(seeks) != 1 || seeks[0].Propose.Order.Passed.Step != math.MaxInt || seeks[0].Of.Now() != again.Job.ID() || len(sent[control.Start](r)) > 0 {
		t.Fatalf("%+v", seeks)
	}
	return r, seeks[0]
}

// A run that begins or continues begins after step 0 when no host has a checkpoint.
func TestGatherOrBegin(t *testing.T) {
	r, seek := gathers(t)
	r.s.cfg.Resume.OrBegin = true
	r.feed(CheckpointVerified{Propose: seek.Propose})
	orders := sent[control.Order](r)
	if len(orders) != 2 || orders[0].From != "" || orders[0].Passed.Step != 0 || r.s.phase != training {
		t.Errorf("%+v, %v", orders, r.s.end.err)
	}
	r, seek = gathers(t)
	r.s.cfg.Resume.OrBegin = true
	r.feed(CheckpointVerified{Propose: seek.Propose, Refused: []string{"the checkpoint of step 2 is not used"}})
	if wrong := new(GatherError); !errors.As(r.s.end.err, &wrong) {
		t.Errorf("over a damaged checkpoint: %v", r.s.end.err)
	}
}

// A run that several hosts resume begins when they have a checkpoint together.
func TestResumeGathers(t *testing.T) {
	r, seek := gathers(t)
	r.feed(CheckpointVerified{Propose: seek.Propose, Step: 1, Refused: []string{"the checkpoint of step 2 is not used"}})
	orders := sent[control.Order](r)
	if len(orders) != 2 || orders[0].From != "/runs/a" || orders[0].Passed.Step != 1 || orders[0].Rollback {
		t.Fatalf("%+v", orders)
	}
	if notes := r.notes("note"); len(notes) != 1 || notes[0] != "the checkpoint of step 2 is not used" {
		t.Errorf("%q", notes)
	}
	if r.s.checkpoints.newest != 1 {
		t.Errorf("the newest checkpoint is of step %d", r.s.checkpoints.newest)
	}
}

// What is missing ends it, and so does a checkpoint that the records do not reach.
func TestResumeNamesWhatIsMissing(t *testing.T) {
	for step, want := range map[int]string{
		0: "no whole checkpoint together: x is missing",
		3: "the checkpoint of step 3 is newer than the records of the machine that resumes, which end at step 2",
	} {
		r, seek := gathers(t)
		r.feed(CheckpointVerified{Propose: seek.Propose, Step: step, Refused: []string{"x is missing"}})
		if bad := new(GatherError); !errors.As(r.s.end.err, &bad) || !strings.Contains(bad.Error(), want) || strings.Contains(bad.Error(), "\n") {
			t.Errorf("%d: %v", step, r.s.end.err)
		}
	}
}

// A run that is stopped before the checkpoint is there ends, whatever is found.
func TestResumeEndsWhileGathering(t *testing.T) {
	r, seek := gathers(t, StopAsked{Interrupt})
	r.feed(CheckpointVerified{Propose: seek.Propose, Step: 1})
	if stopped := new(StoppedError); !errors.As(r.s.end.err, &stopped) || len(sent[control.Order](r)) > 0 {
		t.Errorf("%v", r.s.end.err)
	}
}
