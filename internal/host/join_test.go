package host

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
)

// begun returns the workers that were to be started since it was last asked.
func (r *ran) begun() (all []plan.Worker) {
	r.effects = slices.DeleteFunc(r.effects, func(e effect) bool {
		b, ok := e.(beginWorker)
		if ok {
			all = append(all, b.who)
		}
		return ok
	})
	return all
}

// kinds returns the kinds of the events so far.
func (r *ran) kinds() string {
	var kinds []string
	for _, e := range r.effects {
		if e, ok := e.(writeEvent); ok {
			kinds = append(kinds, e.e.Kind)
		}
	}
	return strings.Join(kinds, " ")
}

func joining(t *testing.T, n int, respawn bool) *ran {
	return trainingOf(t, Config{Start: func(int, int) (Worker, error) { return nil, nil }, Respawn: respawn}, n)
}

func TestAddedWorkersGetAPart(t *testing.T) {
	r := joining(t, 2, false)
	var ids []int
	r.feed(addAsked{2, func(all []int, refusal string) { ids = all }})
	if all := r.begun(); !slices.Equal(ids, []int{2, 3}) || len(all) != 2 || all[1] != (plan.Worker{ID: 3}) {
		t.Fatalf("%v, %v", ids, all)
	}
	r.feed(workerStarted{plan.Worker{ID: 2}, nil}, workerStarted{plan.Worker{ID: 3}, errors.New("no room")})
	sent[control.Start](r)
	r.feed(received{2, control.Hello{Protocol: control.Protocol, WorkerID: 2, PID: 9}}, received{2, readyOf(2)})
	if start := sent[control.Start](r); len(start) != 1 || len(start[2].Plan) != 0 {
		t.Fatalf("starts: %v", start)
	}
	if fills := sent[control.Fill](r); len(fills) == 0 {
		t.Fatal("the controller does not know")
	}
	if kinds := r.kinds(); !strings.Contains(kinds, "refused") || r.s.judged {
		t.Error(kinds)
	}
}

// Whatever is wrong with a worker that is to join, the run goes on.
func TestJoinerIsRefused(t *testing.T) {
	who := control.Hello{Protocol: control.Protocol, WorkerID: 2}
	other := readyOf(2)
	other.Job.Seed = 7
	for name, events := range map[string][]event{
		"seed":       {received{2, who}, received{2, other}},
		"failed":     {received{2, who}, received{2, control.Failed{Kind: control.Usage, Text: "no"}}},
		"other ID":   {received{2, control.Hello{Protocol: control.Protocol, WorkerID: 1}}},
		"no message": {connClosed{2, control.ErrFormat}},
		"too early":  {received{2, who}, received{2, control.Step{Step: 1}}},
	} {
		r := joining(t, 2, true)
		r.feed(addAsked{1, func([]int, string) {}}, workerStarted{plan.Worker{ID: 2}, nil})
		r.begun()
		r.feed(events...)
		r.feed(connClosed{2, errors.New("EOF")}, workerExited{2, Status{Code: -1, Text: "signal: killed"}})
		if r.s.judged || !r.s.workers[2].gone || !strings.Contains(r.kinds(), "refused") || r.s.losses != 0 {
			t.Errorf("%s: %v, %s", name, r.s.err, r.kinds())
		}
		if all := r.begun(); len(all) != 0 {
			t.Errorf("%s: another one is started: %v", name, all)
		}
	}
}

// A replacement that dies before it has a part is replaced, but not for ever.
func TestRespawnEnds(t *testing.T) {
	r := joining(t, 3, true)
	r.feed(connClosed{1, errors.New("EOF")}, workerExited{1, Status{Code: -1, Text: "signal: killed"}})
	n := 0
	for all := r.begun(); len(all) == 1; all = r.begun() {
		if n++; all[0] != (plan.Worker{ID: 1, Incarnation: n}) || n > maxTries {
			t.Fatalf("%v is started", all)
		}
		r.feed(workerStarted{all[0], nil})
		id := len(r.s.workers) - 1
		r.feed(connClosed{id, errors.New("EOF")}, workerExited{id, Status{Code: -1, Text: "signal: killed"}})
	}
	if n != maxTries || r.s.judged {
		t.Errorf("%d tries, %v", n, r.s.err)
	}
}

func TestJoinerThatSaysNothing(t *testing.T) {
	r := joining(t, 2, false)
	r.feed(addAsked{1, func([]int, string) {}}, workerStarted{plan.Worker{ID: 2}, nil})
	at := r.s.alarm()
	if want := r.now.Add(r.s.cfg.HelloTimeout); at != want {
		t.Fatalf("the alarm is at %v, want %v", at, want)
	}
	r.now = at.Add(-time.Second)
	r.feed(alarm{})
	if !strings.Contains(r.kinds(), "refused") || r.s.judged {
		t.Error(r.kinds())
	}
}

func TestAddIsRefused(t *testing.T) {
	for name, r := range map[string]*ran{"alone": trainingOf(t, Config{}, 2), "many": joining(t, 2, false)} {
		n := maxWorkers
		if name == "alone" {
			n = 1
		}
		refusal := ""
		r.feed(addAsked{n, func(_ []int, why string) { refusal = why }})
		if refusal == "" || len(r.begun()) > 0 {
			t.Errorf("%s: %q", name, refusal)
		}
	}
}
