package core

import (
	"encoding/binary"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/compute/zero"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/plan/planner"
	"github.com/soliton-train/soliton/internal/worker/key"
)

// The package comment has the transitions that the code allows, and no others.
func TestTransitions(t *testing.T) {
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]State)
	for s := Joining; s <= Dead; s++ {
		names[strings.ReplaceAll(s.String(), " ", "")] = s
	}
	row, word := regexp.MustCompile(`^//\t(.{13})(.{46}|.*)(.{39}|.*)(.*)$`), regexp.MustCompile(`[A-Z]\w+`)
	documented := make(map[State][]State)
	var from State
	for line := range strings.Lines(string(text)) {
		m := row.FindStringSubmatch(strings.TrimRight(line, "\n"))
		if m == nil {
			continue
		}
		if s, ok := names[strings.ToLower(strings.TrimSpace(m[1]))]; ok {
			from = s
		}
		for _, name := range word.FindAllString(m[4], -1) {
			to, ok := names[strings.ToLower(name)]
			if !ok {
				t.Errorf("the package comment has the state %q", name)
			}
			documented[from] = append(documented[from], to)
		}
	}
	for from := Joining; from <= Dead; from++ {
		for to := Joining; to <= Dead; to++ {
			want := slices.Contains(documented[from], to)
			if from != Left && from != Dead {
				want = want || to == Sealed || to == Dead
				want = want || from >= Sealed && (to == CatchingUp || to == Draining) && from != CatchingUp
			}
			if got := from != to && follows(from, to); got != (want && from != to) {
				t.Errorf("%v after %v: %v, documented %v", to, from, got, want)
			}
		}
	}
}

// What others say is not to be trusted.
func TestParseHostile(t *testing.T) {
	r := Record{LR: 0.1, Suspect: 3, Spoiled: -1, Newest: id.Version{Generation: 2, N: 3}, Stop: "signal", Saving: SavingWanted,
		Losses: []LossSum{{tree.Root(4), Measured{Loss{1.5, 8}, []Loss{{6, 8}, {0.5, 7}}}}}, Spot: []uint32{5, 6, 7}}
	b := r.append(nil)
	if len(b) != recordSize+lossSumSize(2)+3*spotDigestSize {
		t.Errorf("a record of %d bytes", len(b))
	}
	got, err := parseRecord(b, 4, 2, 3)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(r) {
		t.Errorf("%+v, want %+v: %v", got, r, err)
	}
	for _, bad := range [][]byte{nil, b[:recordSize-1], b[:len(b)-1], b[:len(b)-spotDigestSize], slices.Concat(b[:recordSize], make([]byte, lossSumSize(2)+3*spotDigestSize))} {
		if got, err := parseRecord(bad, 4, 2, 3); err == nil {
			t.Errorf("%d bytes are %+v", len(bad), got)
		}
	}
	said := [][]byte{b, {}, {1}}
	all := encodeSaid(said)
	if got, err := decodeSaid(all); err != nil || !slices.EqualFunc(got, said, slices.Equal) {
		t.Errorf("%v, want %v: %v", got, said, err)
	}
	for _, bad := range [][]byte{all[:len(all)-1], {0, 0}, {255, 255, 255, 255, 0}} {
		if got, err := decodeSaid(bad); err == nil {
			t.Errorf("%v is %v", bad, got)
		}
	}
}

// lone returns a worker that works alone on a model of two layers of one parameter.
func lone(t *testing.T) *Worker {
	t.Helper()
	prof := plan.Profile{Layers: []plan.Layer{{Tensors: []int{1}}, {Tensors: []int{1}}}}
	p, _, err := planner.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{ID: 0}}}, prof, planner.Event{Micros: 4})
	if err != nil {
		t.Fatal(err)
	}
	one := zero.Blocks([]zero.Tensor{{Size: 1}})
	w := New(Config{Micros: 4, Layers: []Layer{{"a", one}, {"b", one}}})
	w.plan = &p
	w.index = make(map[id.Range]int)
	for i, s := range p.Shards {
		w.index[RangeOf(s)] = i
		w.all[RangeOf(s)] = &shard{Range: RangeOf(s), holds: true, owner: true, reduces: true}
	}
	w.served = []int{0}
	return w
}

// What a worker says of its blocks is not to be trusted.
func TestJudgeHostile(t *testing.T) {
	w := lone(t)
	good := AppendCheck(false, nil, []Attested{{1, 2, true}, {3, 4, true}})
	words, repairs, _, err := w.judge([][]byte{append(slices.Clone(good), 7)})
	if err != nil || len(repairs) > 0 || !slices.Equal(words[0], []byte{7}) {
		t.Errorf("%v, %v, %v", words, repairs, err)
	}
	change := func(at int, v byte) []byte {
		b := slices.Clone(good)
		b[4] = 1 // a shard
		b[at] = v
		return b
	}
	for _, bad := range [][]byte{nil, good[:len(good)-1], change(0, 2), change(4, 3), change(8, 1), change(11, 255), change(12, 4)} {
		if _, repairs, _, err := w.judge([][]byte{bad}); err == nil {
			t.Errorf("%v says %v", bad, repairs)
		}
	}
}

// A worker that has more altered blocks than it names says nothing of their shards, which is no difference.
func TestJudgeMore(t *testing.T) {
	w := lone(t)
	prof := plan.Profile{Layers: []plan.Layer{{Tensors: []int{1}}, {Tensors: []int{1}}}}
	p, _, err := planner.Next(plan.Plan{}, plan.View{Workers: []plan.Worker{{ID: 0}, {ID: 1}}}, prof, planner.Event{Micros: 4})
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.Shards {
		p.Shards[i].Mirrors = []id.WorkerID{1 - p.Shards[i].Owner}
	}
	w.plan = &p
	said := func(second Attested) [][]byte {
		named := []Offence{{Shard: 0, Block: 0, Target: Mirror}}
		return [][]byte{AppendCheck(false, nil, []Attested{{1, 2, true}, {3, 4, true}}), AppendCheck(false, named, []Attested{{Held: true}, second})}
	}
	if _, repairs, again, err := w.judge(said(Attested{Held: true})); err != nil || len(repairs) != 1 || !again {
		t.Errorf("%d repairs, again %v, %v", len(repairs), again, err)
	}
	if _, _, _, err := w.judge(said(Attested{3, 5, true})); err == nil {
		t.Error("holders that differ are taken for equal")
	}
}

// Parameters that are not expected any more are not there, until those that are missing are expected again.
func TestStoppedIsNotThere(t *testing.T) {
	w := lone(t)
	w.plan.Shards, w.all = nil, nil
	for lo := range 2 {
		w.plan.Shards = append(w.plan.Shards, plan.Shard{Layer: 0, Lo: lo, Hi: lo + 1, Owner: 1})
	}
	if !w.arrived() {
		t.Error("nothing is missing, and not all is there")
	}
	w.expectParams(0, 1)
	for lo := range 2 {
		w.stopArrivals(0, func(r id.Range) bool { return r.Lo == lo })
		if w.arrived() {
			t.Errorf("all is there with %d of 2 stopped", lo+1)
		}
	}
	w.expectParams(0, 1)
	if w.arrived() || len(w.tickets) != 2 {
		t.Errorf("%d messages are expected", len(w.tickets))
	}
	for ticket := range w.tickets {
		w.Step(Received{Ticket: ticket, Duplicate: true}) // they came before
	}
	if !w.arrived() {
		t.Error("nothing is missing any more, and not all is there")
	}
	w.expectParams(0, 2)
	w.dropArrivals(0)
	if !w.arrived() || len(w.tickets) != 0 {
		t.Error("passes wait for a layer that was dropped")
	}
	var opened int
	for _, d := range w.out {
		if d == (Gate{Layer: 0, Open: true}) {
			opened++
		}
	}
	if opened != 2 {
		t.Errorf("the gate was opened %d times", opened)
	}
}

// A worker that joins gets the result of the newest commit, with its metrics.
func TestResultForJoiner(t *testing.T) {
	r := Result{Step: 7, Loss: 0.25, Targets: 8, LR: 0.1, GradNorm: 3, Stop: "signal", Metrics: []Loss{{6, 8}, {0.5, 7}}, Plan: id.Version{Generation: 2, N: 3}}
	b := r.append(nil)
	if got := parseResult(b, 2); len(b) != resultSize(2) || fmt.Sprint(got) != fmt.Sprint(r) {
		t.Errorf("%d bytes are %+v, want %+v", len(b), got, r)
	}
}

// A base is copied at once, also in the middle of a step, and the gradients that are complete already follow it. Where the source was
// altered, the copy is made after the next update, and not tried before.
func TestBaseInAStep(t *testing.T) {
	w := lone(t)
	w.plan.Workers, w.passed, w.state = []plan.Worker{{ID: 0}}, id.Point{Step: 2}, Working
	r := RangeOf(w.plan.Shards[0])
	w.step = &step{number: 3}
	w.all[r].complete = true
	fill := func(n int) Transfer {
		w.fill(control.Fill{ID: id.Fill{Term: 1, N: n}, Peers: []control.Peer{{Worker: plan.Worker{ID: 1}}}, Transfers: []plan.Transfer{{Range: r, From: 0, To: 1}}})
		return w.outgoing[0].Transfer
	}
	of := fill(1)
	w.out = nil
	if !w.base() || !w.has(onFill) || fmt.Sprint(w.out) != fmt.Sprint([]Duty{CopyBases{2, []Copy{{of, r}}}}) {
		t.Fatalf("%+v", w.out)
	}
	w.out = nil
	w.Step(Copied{[]Transfer{of}})
	w.Step(BasesCopied{})
	if len(w.out) != 2 || w.out[0].(SendFill).Content != BaseState || w.out[1].(SendFill).Content != Increment || !w.idle() {
		t.Errorf("%+v", w.out)
	}
	w.out = nil
	if w.stopCopies(); len(w.out) > 0 {
		t.Errorf("it is copied: %+v", w.out)
	}
	of, w.out = fill(2), nil
	w.all[r].complete = false
	if !w.base() {
		t.Fatal("the second base is not copied")
	}
	w.Step(Copied{}) // altered
	w.Step(BasesCopied{})
	if w.base() {
		t.Error("it is tried again in the step")
	}
	w.out = nil
	if w.stopCopies(); len(w.out) != 1 || w.out[0] != Duty(StopCopies{}) {
		t.Errorf("it may still be copied: %+v", w.out)
	}
	w.step, w.passed.Step, w.out = nil, 3, nil
	w.update(&request{}, key.Try{}, zero.Update{Step: 3})
	if d, ok := w.out[len(w.out)-1].(Update); !ok || !slices.Equal(d.Copies, []Copy{{of, r}}) {
		t.Errorf("%+v", w.out)
	}
}

// Bases are copied as far as those on their way leave room, one at least; the next one once another is sent.
func TestBasesAreBounded(t *testing.T) {
	w := lone(t)
	w.plan.Workers, w.passed, w.state, w.c.Flying = []plan.Worker{{ID: 0}}, id.Point{Step: 2}, Working, 1
	r := RangeOf(w.plan.Shards[0])
	f := control.Fill{ID: id.Fill{Term: 1, N: 1}}
	for to := range id.WorkerID(2) {
		f.Peers = append(f.Peers, control.Peer{Worker: plan.Worker{ID: to + 1}})
		f.Transfers = append(f.Transfers, plan.Transfer{Range: r, From: 0, To: to + 1})
	}
	w.fill(f)
	for i, o := range w.outgoing {
		if w.out = nil; !w.base() || !slices.Equal(w.out[0].(CopyBases).Copies, []Copy{{o.Transfer, r}}) {
			t.Fatalf("base %d: %+v", i, w.out)
		}
		w.Step(Copied{[]Transfer{o.Transfer}})
		w.Step(BasesCopied{})
		if w.base() {
			t.Errorf("another base is copied while %d is on its way", i)
		}
		w.baseSent(o.Transfer)
	}
	if w.base() {
		t.Error("a third base is copied")
	}
}

// Transfers that come while a plan is being applied are made for that plan: they begin once it is applied. A recovery drops them.
func TestFillBeforeThePlan(t *testing.T) {
	w := lone(t)
	r := RangeOf(w.plan.Shards[0])
	fill := func(n int) {
		w.out = nil
		w.fill(control.Fill{ID: id.Fill{Term: 1, N: n}, Peers: []control.Peer{{Worker: plan.Worker{ID: 1}}}, Transfers: []plan.Transfer{{Range: r, From: 1, To: 0}}})
	}
	w.state, w.order, w.resuming = Editing, &control.Order{Plan: *w.plan}, nil
	if fill(1); len(w.incoming) > 0 {
		t.Fatal("it begins before the plan is applied")
	}
	if w.apply(w.order); w.err != nil || len(w.incoming) != 1 || w.incoming[0].r != r {
		t.Fatalf("%v, %+v", w.err, w.incoming)
	}
	w.order = &control.Order{Plan: *w.plan}
	fill(2)
	w.state = Editing
	w.query(control.Query{Ballot: id.Ballot{Term: 1}})
	if w.deferred != nil {
		t.Error("it outlives a recovery")
	}
}

// A plan that leaves what a worker holds and serves as it is does not wait for the end of an evaluation that was stopped, of which nothing counts:
// the evaluation begins again after that. A plan that alters something waits.
func TestEvaluationThatIsStopped(t *testing.T) {
	for _, alters := range []bool{false, true} {
		w := lone(t)
		w.plan.Workers, w.passed, w.state = []plan.Worker{{ID: 0}}, id.Point{Step: 2}, Working
		did := func() (kinds string) {
			for _, d := range w.Ready() {
				kinds += fmt.Sprintf("%T ", d)
			}
			return strings.ReplaceAll(kinds, "core.", "")
		}
		w.Step(Ask{Point: id.Point{Step: 2, Gate: id.Evaluated}, Micros: 4})
		if got := did(); got != "Operate " {
			t.Fatal(got)
		}
		b := id.Ballot{Term: 1}
		w.Step(control.Query{Ballot: b})
		if got := did(); got != "control.Answer StopOperate " {
			t.Fatal(got)
		}
		next := *w.plan
		next.Version.N++
		if alters {
			next.Shards = next.Shards[:1]
		}
		w.Step(control.Order{Ballot: b, Plan: next, Passed: w.passed})
		end := Answered{Said: []byte{1}} // it had come to its end before that was known
		edited := did()
		if waits := !strings.Contains(edited, "Edit "); waits != alters {
			t.Fatalf("alters %v, waits %v: %s", alters, waits, edited)
		}
		if alters {
			if w.Step(end); !strings.Contains(did(), "Edit ") {
				t.Error("it waits on when the evaluation has ended")
			}
			continue
		}
		w.Step(OpDone{Op: w.lastOp})
		if got := did(); !strings.Contains(got, "Apply ") || !strings.Contains(got, "control.Applied ") || strings.Contains(got, "Operate ") {
			t.Errorf("the plan is applied: %s", got)
		}
		if w.Step(end); w.req.said != nil {
			t.Error("what it says under the plan before counts")
		}
		if got := did(); got != "Operate " {
			t.Errorf("when it has ended: %s", got)
		}
	}
}

// State that comes nearer to the step with each commit is waited for. Over a link that is slower than training it does not: then this worker says that
// it has come, and a plan goes live that gives it the state.
func TestStateThatComesNoNearer(t *testing.T) {
	w := lone(t)
	w.plan.Workers, w.passed, w.state = []plan.Worker{{ID: 0}}, id.Point{Step: 9}, Working
	r := RangeOf(w.plan.Shards[0])
	next := *w.plan
	next.Version.N++
	w.pending = []control.Order{{Plan: next}}
	var in *incoming
	fill := func(n int) {
		w.fill(control.Fill{ID: id.Fill{Term: 1, N: n}, Peers: []control.Peer{{Worker: plan.Worker{ID: 1}}}, Transfers: []plan.Transfer{{Range: r, From: 1, To: 0}}})
		in, w.out = w.incoming[0], nil
	}
	// commits returns what this worker says after some, between which so many updates are replayed.
	commits := func(n, replayed int) (level bool, live id.Version) {
		for range n {
			w.watchFills()
			live = w.newest()
			w.passed.Step++
			in.step += replayed
		}
		for _, d := range w.out {
			_, is := d.(control.Level)
			level = level || is
		}
		return level, live
	}
	fill(1)
	if level, live := commits(3*maxStalled, 0); level || live != w.plan.Version {
		t.Errorf("before the base has come: level %v, plan %v", level, live)
	}
	in.based, in.step = true, w.passed.Step-12
	if level, live := commits(9, 2); level || live != w.plan.Version {
		t.Errorf("nearer with each commit: level %v, plan %v", level, live)
	}
	if level, live := commits(4, 2); !level || live != next.Version {
		t.Errorf("once it is there: level %v, plan %v", level, live)
	}
	fill(2)
	in.based, in.step = true, w.passed.Step-12
	if level, live := commits(maxStalled, 1); level || live != w.plan.Version {
		t.Errorf("no nearer for %d commits: level %v, plan %v", maxStalled-1, level, live)
	}
	if level, live := commits(1, 1); !level || live != next.Version {
		t.Errorf("no nearer for %d commits: level %v, plan %v", maxStalled, level, live)
	}

	// Other state is sent first for a while.
	fill(3)
	in.based, in.step = true, w.passed.Step
	commits(maxStalled, 1)
	in.step -= 8
	if _, live := commits(maxStalled+1, 2); live != w.plan.Version {
		t.Errorf("nearer again after it was there: plan %v", live)
	}

	// Now it is there, now it is not.
	fill(4)
	in.based, in.step = true, w.passed.Step
	for i := range 2 * maxLacked {
		if _, live := commits(1, i%2*2); live != next.Version && i%2 == 0 || live == next.Version && i%2 == 1 && i < 2*maxLacked-1 {
			t.Fatalf("commit %d: plan %v", i, live)
		}
	}
	if _, live := commits(2, 0); live != next.Version {
		t.Errorf("lacking something at %d commits: plan %v", maxLacked, live)
	}
}

// While an update is replayed, or waits for it, the next one comes, its gradient into other memory.
func TestUpdateComesBesideReplay(t *testing.T) {
	w := lone(t)
	w.plan.Workers, w.passed, w.state = []plan.Worker{{ID: 0}}, id.Point{Step: 9}, Working
	r := RangeOf(w.plan.Shards[0])
	w.fill(control.Fill{ID: id.Fill{Term: 1, N: 1}, Peers: []control.Peer{{Worker: plan.Worker{ID: 1}}}, Transfers: []plan.Transfer{{Range: r, From: 1, To: 0}}})
	in := w.incoming[0]
	in.based, in.step = true, 6
	w.receiveUpdate(in)
	comes := func() (into int) {
		into = in.into
		numbers := make([]byte, numbersSize)
		binary.NativeEndian.PutUint32(numbers[8:], uint32(in.try.Word()))
		w.numbersCame(in, numbers)
		w.incrementCame(in, 4*(r.Hi-r.Lo))
		return into
	}
	for step := 7; step <= 9; step++ {
		if first := comes(); step == 7 && comes() == first {
			t.Fatal("two gradients come into the same memory")
		}
		if in.here() != step || in.step != step-1 || !slices.Equal(w.due, []*incoming{in}) {
			t.Fatalf("step %d: here as of %d, made of %d, %d updates are due", step, in.here(), in.step, len(w.due))
		}
		w.out = nil
		if !w.replay() {
			t.Fatalf("step %d is not replayed", step)
		}
		if d := w.out[0].(Replay); d.Update.Step != step || d.Increment == in.into {
			t.Errorf("step %d: %+v, while the next gradient comes into %d", step, d, in.into)
		}
		w.Step(Replayed{})
	}
	if in.step != 9 || in.here() != 10 { // of the two that came at first, one is always ahead
		t.Errorf("made of step %d, and here as of %d", in.step, in.here())
	}
}
