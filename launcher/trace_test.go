package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"

	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

// collector is a receiver of OTLP over HTTP, on the official definitions of the protocol.
type collector struct {
	t   *testing.T
	url string

	mu    sync.Mutex
	spans []trace.Span
	other map[string]int // requests for other paths
	seen  bytes.Buffer   // all that came
}

func collect(t *testing.T) *collector {
	c := &collector{t: t, other: make(map[string]int)}
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	c.url = s.URL
	return c
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.URL.Path != "/v1/traces" {
		c.other[r.URL.Path]++
		return
	}
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			c.t.Error(err)
			return
		}
		body = z
	}
	text, err := io.ReadAll(body)
	var m coltrace.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(text, &m)
	}
	if err != nil {
		c.t.Error(err)
		return
	}
	c.seen.Write(text)
	for _, rs := range m.ResourceSpans {
		worker := trace.Agent
		for _, a := range rs.Resource.Attributes {
			if a.Key == trace.KeyWorker {
				worker = int(a.Value.GetIntValue())
			}
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				x := trace.Span{
					Context: trace.Context{Trace: trace.ID(s.TraceId), Span: trace.SpanID(s.SpanId)}, Name: s.Name, Worker: worker,
					Start: time.Unix(0, int64(s.StartTimeUnixNano)), End: time.Unix(0, int64(s.EndTimeUnixNano)),
				}
				if len(s.ParentSpanId) > 0 {
					x.Parent = trace.SpanID(s.ParentSpanId)
				}
				if s.Status != nil {
					x.Error = s.Status.Message
				}
				for _, a := range s.Attributes {
					switch v := a.Value.GetValue().(type) {
					case *commonpb.AnyValue_IntValue:
						x.Attrs = append(x.Attrs, trace.Attr{Key: a.Key, Value: int(v.IntValue)})
					case *commonpb.AnyValue_BoolValue:
						x.Attrs = append(x.Attrs, trace.Attr{Key: a.Key, Value: v.BoolValue})
					case *commonpb.AnyValue_StringValue:
						x.Attrs = append(x.Attrs, trace.Attr{Key: a.Key, Value: v.StringValue})
					}
				}
				for _, l := range s.Links {
					x.Links = append(x.Links, trace.Link{Context: trace.Context{Trace: trace.ID(l.TraceId), Span: trace.SpanID(l.SpanId)}})
				}
				c.spans = append(c.spans, x)
			}
		}
	}
}

// named returns the spans of a name, in a trace where that is not zero.
func named(spans []trace.Span, in trace.ID, name string) (all []trace.Span) {
	for _, s := range spans {
		if s.Name == name && (in == trace.ID{} || s.Trace == in) {
			all = append(all, s)
		}
	}
	return all
}

// traced runs a job that a collector hears of, and returns what it heard, what the file says, and the lines
// of the other files.
func traced(t *testing.T, flags ...string) (c *collector, file []trace.Span, events []rundir.Event, steps []rundir.Metrics) {
	t.Helper()
	c = collect(t)
	// Links to a worker that ends are forgiven for a tenth of --detect: on a busy machine its end may be known later than that by default,
	// and then it is two recoveries.
	args := append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--detect", "5s"}, flags...)
	cmd := launch(t, append(args, mlp, "--steps", "200", "--micro-batch", "4", "--checkpoint-every", "20ms")...)
	cmd.Env = append(os.Environ(), "OTEL_EXPORTER_OTLP_ENDPOINT="+c.url, "OTEL_EXPORTER_OTLP_HEADERS=authorization=top-secret", "SECRET=top-secret")
	if status, stdout, stderr := result(t, cmd); status != 0 {
		t.Fatalf("%d\n%s%s", status, stdout, stderr)
	}
	dir := filepath.Join(cmd.Dir, "run")
	text, err := os.ReadFile(filepath.Join(dir, "traces.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if err := trace.Read(bytes.NewReader(text), func(s trace.Span) { file = append(file, s) }); err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("top-secret")) || bytes.Contains(c.seen.Bytes(), []byte("top-secret")) {
		t.Error("a secret is in the traces")
	}
	return c, file, linesOf[rundir.Event](t, filepath.Join(dir, "events.jsonl")), linesOf[rundir.Metrics](t, filepath.Join(dir, "metrics.jsonl"))
}

func linesOf[T any](t *testing.T, path string) (all []T) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var v T
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
	return all
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// near allows for what the times of the line files leave out, which have milliseconds.
func near(a, b float64) bool { return math.Abs(a-b) <= 1 }

// same allows for what their durations leave out, which have microseconds.
func same(a, b float64) bool { return math.Abs(a-b) <= .002 }

// planNumber is the number of the plan that a span is about.
func planNumber(s *trace.Span) uint64 {
	_, n, _ := strings.Cut(s.Text(trace.KeyPlan), ".")
	v, _ := strconv.ParseUint(n, 10, 64)
	return v
}

// consistent fails unless spans, events and metrics say the same of steps, plan versions and times.
func consistent(t *testing.T, name string, spans []trace.Span, events []rundir.Event, steps []rundir.Metrics) {
	t.Helper()
	told := make(map[int]bool)
	for _, s := range named(spans, trace.ID{}, trace.Step) {
		if s.Worker != trace.Agent {
			continue
		}
		m := steps[s.Int(trace.KeyStep, 0)-1]
		told[m.Step] = true
		if !same(ms(s.End.Sub(s.Start)), m.MS) || !near(ms(s.End.Sub(m.Time.Time)), 0) || s.Int(trace.KeyTokens, 0) != int(m.Tokens) || planNumber(&s) != m.Plan || s.Int(trace.KeyWorkers, 0) != m.Workers {
			t.Errorf("%s: step %+v, metrics %+v", name, s, m)
		}
	}
	for _, m := range steps {
		if (m.Step%4 == 0 || m.Step == 1) && !told[m.Step] {
			t.Errorf("%s: nothing of step %d", name, m.Step)
		}
	}
	// A recovery that another fault has superseded is in the event of the one that ended.
	var recovered []rundir.Event
	saved := make(map[int]time.Time)
	for _, e := range events {
		switch {
		case e.Recovery != nil:
			recovered = append(recovered, e)
		case e.Kind == "checkpoint":
			var step int
			if _, err := fmt.Sscanf(e.Reason, "the state after step %d", &step); err != nil {
				t.Error(err)
			}
			saved[step] = e.Time.Time
		}
	}
	roots := named(spans, trace.ID{}, trace.Recovery)
	slices.SortFunc(roots, func(a, b trace.Span) int { return a.End.Compare(b.End) })
	for _, root := range roots {
		if len(recovered) == 0 {
			t.Fatalf("%s: %d roots of recoveries are too many", name, len(roots))
		}
		e := recovered[0]
		if root.Int(trace.KeyStep, 0) != e.Step {
			t.Errorf("%s: root %+v, event %+v", name, root, e)
		}
		if root.True(trace.KeySuperseded) {
			if root.End.After(e.Time.Add(time.Millisecond)) {
				t.Errorf("%s: %+v ends after %v", name, root, e.Time)
			}
			continue
		}
		recovered = recovered[1:]
		if planNumber(&root) != e.Plan || !near(ms(root.End.Sub(e.Time.Time)), 0) {
			t.Errorf("%s: root %+v, event %+v", name, root, e)
		}
	}
	for _, s := range named(spans, trace.ID{}, trace.Checkpoint) {
		at, ok := saved[s.Int(trace.KeyStep, 0)]
		if delete(saved, s.Int(trace.KeyStep, 0)); !ok || !near(ms(s.End.Sub(at)), 0) {
			t.Errorf("%s: checkpoint %+v, event at %v", name, s, at)
		}
	}
	if len(recovered)+len(saved) > 0 {
		t.Errorf("%s: no spans of %v and checkpoints %v", name, recovered, saved)
	}
	// Each other change of the plan is there.
	for _, e := range events {
		if e.Kind == "plan" && e.Plan > 1 && !slices.ContainsFunc(spans, func(s trace.Span) bool {
			return (s.Name == trace.Change || s.Name == trace.Recovery || s.Name == trace.Relief) && planNumber(&s) == e.Plan && !s.End.Before(e.Time.Time)
		}) {
			t.Errorf("%s: no span of plan %d", name, e.Plan)
		}
	}
}

func TestRecoveryIsOneTrace(t *testing.T) {
	t.Parallel()
	c, file, events, steps := traced(t, "--workers", "4", "--stages", "2", "--chaos", "kill:2@7")
	for name, spans := range map[string][]trace.Span{"collector": c.spans, "file": file} {
		roots := named(spans, trace.ID{}, trace.Recovery)
		if len(roots) != 1 {
			t.Fatalf("%s: %d recoveries", name, len(roots))
		}
		root := roots[0]
		i := slices.IndexFunc(events, func(e rundir.Event) bool { return e.Recovery != nil })
		e := events[i]
		if !same(ms(root.End.Sub(root.Start)), e.TotalMS) || !near(ms(root.End.Sub(e.Time.Time)), 0) {
			t.Errorf("%s: the root takes %v until %v, and the event says %v ms until %v", name, root.End.Sub(root.Start), root.End, e.TotalMS, e.Time)
		}
		if root.Int(trace.KeyStep, 0) != e.Step || root.Text(trace.KeyCause) != e.Cause || planNumber(&root) != e.Plan {
			t.Errorf("%s: root %+v, event %+v", name, root, e)
		}
		for i, want := range []float64{e.DetectMS, e.QueryMS, e.PlanMS, e.AgreeMS, e.EditMS, e.ResumeMS} {
			phase := slices.DeleteFunc(named(spans, root.Trace, trace.Phases[i]), func(s trace.Span) bool { return s.Worker != trace.Agent })
			if len(phase) != 1 || phase[0].Parent != root.Span || !same(ms(phase[0].End.Sub(phase[0].Start)), want) {
				t.Errorf("%s: phase %s: %+v, want %v ms", name, trace.Phases[i], phase, want)
			}
		}
		if last := named(spans, root.Trace, trace.Last); len(last) != 1 || last[0].Worker != 2 || last[0].Parent != root.Span || last[0].Error == "" {
			t.Errorf("%s: of the dead worker: %+v", name, last)
		}
		for _, what := range []string{trace.Answer, "edit", "resume"} {
			var who []int
			for _, s := range named(spans, root.Trace, what) {
				if s.Worker != trace.Agent && s.Parent == root.Span {
					who = append(who, s.Worker)
				}
			}
			if slices.Sort(who); !slices.Equal(who, []int{0, 1, 3}) {
				t.Errorf("%s: %s of workers %v", name, what, who)
			}
		}
		// It is linked to the step that it interrupted, of which all there is was told.
		struck := slices.IndexFunc(spans, func(s trace.Span) bool { return s.Name == trace.Step && s.Context == root.Links[0].Context })
		if struck < 0 || spans[struck].Int(trace.KeyStep, 0) != e.Step {
			t.Errorf("%s: links to %+v", name, root.Links)
		}
		consistent(t, name, spans, events, steps)
		// All that there is to tell of is there, with the passes below their stages.
		for _, what := range []string{trace.Stage, trace.Forward, trace.Backward, trace.Reduce, trace.Commit, trace.Update, trace.Transfer, trace.Arrive, trace.Checkpoint} {
			if len(named(spans, trace.ID{}, what)) == 0 {
				t.Errorf("%s: no %s among %d spans", name, what, len(spans))
			}
		}
		stages := make(map[trace.Context]trace.Span)
		for _, s := range named(spans, trace.ID{}, trace.Stage) {
			stages[s.Context] = s
		}
		for _, s := range append(named(spans, trace.ID{}, trace.Forward), named(spans, trace.ID{}, trace.Backward)...) {
			st, ok := stages[trace.Context{Trace: s.Trace, Span: s.Parent}]
			if !ok || st.Worker != s.Worker || st.Int(trace.KeyStage, -1) != s.Int(trace.KeyStage, -2) || s.Start.Before(st.Start) || s.End.After(st.End) {
				t.Errorf("%s: %+v is not within its stage %+v", name, s, st)
			}
		}
		if slices.ContainsFunc(events, func(e rundir.Event) bool { return e.Kind == "protected" }) && len(named(spans, trace.ID{}, trace.Migration)) == 0 {
			t.Errorf("%s: no migration, and shards have got new mirrors", name)
		}
	}
	if len(file) != len(c.spans) {
		t.Errorf("%d spans in the file, %d at the collector", len(file), len(c.spans))
	}
	if c.other["/v1/metrics"] == 0 {
		t.Errorf("no measures came: %v", c.other)
	}
}

func TestFaultDuringARecoveryIsATraceOfItsOwn(t *testing.T) {
	t.Parallel()
	// The worker that is stopped does not answer the query that the other one's death brings, until the run continues without it. On a
	// busy machine, the run may do so before the other one is killed.
	var file []trace.Span
	var events []rundir.Event
	var steps []rundir.Metrics
	var roots []trace.Span
	within := false
	for try := range 5 {
		_, file, events, steps = traced(t, "--workers", "4", "--mirrors", "2", "--chaos", "freeze:1@7,kill:2@7+8")
		roots = named(file, trace.ID{}, trace.Recovery)
		if len(roots) != 2 {
			t.Logf("try %d: %d recoveries", try, len(roots))
			continue
		}
		// One may end after the kill, and before the agent knows of that.
		if within = roots[0].True(trace.KeySuperseded) || roots[1].True(trace.KeySuperseded); within {
			break
		}
		t.Logf("try %d: one recovery after the other", try)
	}
	if !within {
		t.Fatal("no try had a fault during a recovery")
	}
	if roots[0].Start.After(roots[1].Start) {
		roots[0], roots[1] = roots[1], roots[0]
	}
	if roots[0].Trace == roots[1].Trace || !slices.ContainsFunc(roots[1].Links, func(l trace.Link) bool { return l.Context == roots[0].Context }) &&
		!slices.ContainsFunc(roots[0].Links, func(l trace.Link) bool { return l.Context == roots[1].Context }) {
		t.Errorf("not linked: %+v", roots)
	}
	consistent(t, "file", file, events, steps)
	// The first one ends where the controller knows of the second fault, and all that the event tells of
	// lies in both together.
	e := events[slices.IndexFunc(events, func(e rundir.Event) bool { return e.Recovery != nil })]
	if roots[0].End.After(roots[1].End) {
		roots[0], roots[1] = roots[1], roots[0]
	}
	detect := named(file, roots[1].Trace, "detect")
	if !roots[0].True(trace.KeySuperseded) || roots[1].True(trace.KeySuperseded) || len(detect) != 1 || !roots[0].End.Equal(detect[0].End) || !roots[0].End.Before(roots[1].End) {
		t.Errorf("%+v, then %+v with %+v", roots[0], roots[1], detect)
	}
	if !same(ms(roots[1].End.Sub(roots[0].Start)), e.TotalMS) {
		t.Errorf("from %v to %v, event %v ms", roots[0].Start, roots[1].End, e.TotalMS)
	}
	for _, r := range roots {
		at := r.Start
		for _, s := range file {
			if s.Parent == r.Span && s.Worker == trace.Agent {
				if !s.Start.Equal(at) {
					t.Errorf("%s begins %v after the phase before", s.Name, s.Start.Sub(at))
				}
				at = s.End
			}
		}
		if !at.Equal(r.End) {
			t.Errorf("phases end at %v, their recovery at %v", at, r.End)
		}
	}
	// Both survivors have applied the last plan, and those that the second fault left time for the first one.
	edits := make(map[trace.ID]int)
	for _, s := range named(file, trace.ID{}, "edit") {
		if s.Worker != trace.Agent {
			edits[s.Trace]++
		}
	}
	if first := edits[roots[0].Trace]; edits[roots[1].Trace] != 2 || first > 3 || first > 0 && planNumber(&roots[0]) == 0 {
		t.Errorf("%d edits of 2 survivors, after %d of plan %d", edits[roots[1].Trace], first, planNumber(&roots[0]))
	}
}

func TestTelemetryCanBeTurnedOff(t *testing.T) {
	t.Parallel()
	cmd := launch(t, "run", "--plain", "--workers", "2", "--run-dir", "run", mlp, "--steps", "3")
	cmd.Env = append(os.Environ(), "OTEL_SDK_DISABLED=true")
	if status, stdout, stderr := result(t, cmd); status != 0 {
		t.Fatalf("%d\n%s%s", status, stdout, stderr)
	}
	if info, err := os.Stat(filepath.Join(cmd.Dir, "run", "traces.jsonl")); err != nil || info.Size() > 0 {
		t.Errorf("%v, %v", info, err)
	}
	cmd = launch(t, "run", "--plain", "--workers", "2", "--run-dir", "run", mlp, "--steps", "3")
	cmd.Env = append(os.Environ(), "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL=http/json")
	if status, _, stderr := result(t, cmd); status == 0 || !strings.Contains(stderr, `OTEL_EXPORTER_OTLP_PROTOCOL is "http/json": give http/protobuf or grpc`) {
		t.Errorf("%d: %s", status, stderr)
	}
}

func TestTraceCommand(t *testing.T) {
	t.Parallel()
	cmd := launch(t, "run", "--plain", "--threads", "1", "--workers", "3", "--run-dir", "run", "--chaos", "kill:2@4", mlp, "--steps", "8", "--micro-batch", "4")
	status, stdout, stderr := result(t, cmd)
	if status != 0 || !strings.Contains(stdout, "worker 2 killed · training again after ") {
		t.Fatalf("%d\n%s%s", status, stdout, stderr)
	}
	run := func(args ...string) string {
		next := launch(t, append([]string{"trace", "run"}, args...)...)
		next.Dir = cmd.Dir
		status, stdout, stderr := result(t, next)
		if status != 0 {
			t.Fatalf("%d\n%s%s", status, stdout, stderr)
		}
		return stdout
	}
	text := run("--perfetto", "out.json")
	over := launch(t, "trace", "run", "--perfetto", "run/traces.jsonl")
	over.Dir = cmd.Dir
	if status, _, stderr := result(t, over); status != 2 || !strings.Contains(stderr, "--perfetto run/traces.jsonl: the run's own file; give another name") {
		t.Errorf("%d: %s", status, stderr)
	}
	struck := "recovery in step 4: "
	if early := "recovery in step 3: "; strings.Contains(text, early) {
		struck = early // on a busy machine, the others may not have passed the third yet
	}
	for _, want := range []string{struck, "  worker 2 exited: signal: killed\n", "  detect ", "  resume ", "█", "slowest worker: "} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	var report trace.Report
	err := json.Unmarshal([]byte(run("--json")), &report)
	// Traced in full are the first step, the one that was struck, the fourth in any case, the eighth, and those in which a late worker was relieved.
	if err != nil || report.Steps < 3 || report.Steps > 4+len(report.Reliefs) {
		t.Errorf("%v: %+v", err, report)
	}
	ended := slices.DeleteFunc(slices.Clone(report.Recoveries), func(r trace.RecoveryReport) bool { return r.Superseded }) // one of a link that broke first
	if len(ended) != 1 || len(ended[0].Phases) != 6 {
		t.Errorf("%+v", report.Recoveries)
	}
	file, err := os.ReadFile(filepath.Join(cmd.Dir, "out.json"))
	if err != nil {
		t.Fatal(err)
	}
	checkTraceEvents(t, file, 3)
	var narrow strings.Builder
	if err := inspect.PrintTrace(&narrow, report, 30); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(narrow.String()) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 30 {
			t.Errorf("%d cells: %s", n, line)
		}
	}
}
