package telemetry

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T) *Telemetry {
	t.Helper()
	tl, err := New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return tl
}

func TestFile(t *testing.T) {
	tl := open(t)
	run := trace.RunOf("job", time.Unix(1, 0))
	var text strings.Builder
	tl.Begin(run, "gpt", func(line []byte) error { text.Write(append(line, '\n')); return nil })
	root := run.Root(trace.Recovery, 1, 1)
	start := time.Unix(100, 7)
	tl.Spans([]trace.Span{
		{
			Context: root, Name: trace.Recovery, Worker: trace.Agent, Start: start, End: start.Add(time.Second), Error: strings.Repeat("x", 2*maxText),
			Attrs: []trace.Attr{{Key: trace.KeyStep, Value: 7}, {Key: trace.KeyCause, Value: "why"}, {Key: "a", Value: int64(1)}, {Key: "b", Value: 1.5}, {Key: "c", Value: true}},
			Links: []trace.Link{{Context: run.Root(trace.Step, 7), Why: "interrupted step"}},
		},
		{Context: trace.Context{Trace: root.Trace}, Parent: root.Span, Name: "edit", Worker: 2, Incarnation: 1, Start: start, End: start.Add(1)},
		{Name: "of no trace"},
	})
	if err := tl.Close(); err != nil {
		t.Fatal(err)
	}
	tl.Spans([]trace.Span{{Context: root, Name: "late"}}) // changes nothing
	var got []trace.Span
	if err := trace.Read(strings.NewReader(text.String()), func(s trace.Span) { got = append(got, s) }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 {
		t.Fatalf("%+v", got)
	}
	for _, s := range got {
		switch s.Name {
		case trace.Recovery:
			if s.Context != root || s.Worker != trace.Agent || !s.Start.Equal(start) || s.End.Sub(s.Start) != time.Second || len(s.Error) != maxText ||
				s.Int(trace.KeyStep, 0) != 7 || s.Text(trace.KeyCause) != "why" || len(s.Attrs) != 5 || s.Links[0] != (trace.Link{Context: run.Root(trace.Step, 7), Why: "interrupted step"}) {
				t.Errorf("%+v", s)
			}
		case "edit":
			if s.Trace != root.Trace || s.Parent != root.Span || s.Worker != 2 || s.Incarnation != 1 || s.Span == (trace.SpanID{}) {
				t.Errorf("%+v", s)
			}
		}
	}
	if !strings.Contains(text.String(), `"service.name"`) || !strings.Contains(text.String(), `"service.instance.id"`) {
		t.Error("the resource is not told")
	}
}

// A file that is full has room for recoveries, and then for nothing.
func TestFileIsBounded(t *testing.T) {
	var lines []trace.Data
	f := &file{add: func(line []byte) error {
		var d trace.Data
		if err := json.Unmarshal(line, &d); err != nil {
			return err
		}
		lines = append(lines, d)
		return nil
	}}
	for _, c := range []struct {
		size  int
		spans int
	}{{0, 2}, {maxFile + 1, 1}, {maxFileRecoveries, 0}} {
		f.size, lines = c.size, nil
		if err := f.UploadTraces(t.Context(), protoSpans("forward", "query")); err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, d := range lines {
			n += len(d.ResourceSpans[0].ScopeSpans[0].Spans)
		}
		if n != c.spans {
			t.Errorf("at %d bytes, %d spans were written, want %d", c.size, n, c.spans)
		}
	}
}

func TestHandler(t *testing.T) {
	tl := open(t)
	defer tl.Close()
	tl.Board.Measure(trace.StepDone{Step: 1, Seconds: .2, Tokens: 100, Loss: 2.5, Workers: 4})
	tl.Board.Measure(trace.WorkerStep{Worker: 3, Seconds: .2, Compute: .15, Reduced: 400})
	tl.Board.Measure(trace.Traffic{From: 0, To: 1, Bytes: 10})
	tl.Board.Measure(trace.Traffic{From: 0, To: 1, Bytes: 30})
	tl.Board.Measure(trace.Traffic{From: 0, To: 1, Bytes: 5}) // of another incarnation
	tl.Board.Measure(trace.Collective{Name: "reduce", Seconds: .01})
	tl.Board.Measure(trace.RecoveryDone{Seconds: .009, Phases: [6]float64{.001, .002}, Recomputed: 3})
	tl.Board.Measure(trace.MirrorLag{Steps: 2})
	for _, j := range []float64{2, 5, 1} { // the last after it was opened again
		tl.Board.Measure(trace.Device{Name: "GPU 0", Kind: "gpu", Hertz: 1.2e9, Joules: j})
	}
	// A board serves what it is told, and nil is nothing.
	board, err := NewBoard(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	board.Measure(nil)
	board.Measure(trace.MirrorLag{Steps: 7})
	w := httptest.NewRecorder()
	board.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(w.Body.String(), "soliton_mirror_lag{") {
		t.Errorf("of the board:\n%s", w.Body)
	}
	w = httptest.NewRecorder()
	tl.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body := w.Body.String()
	for _, want := range []string{
		"soliton_step_duration_seconds_count{", "soliton_step_tokens_total{", "soliton_worker_bubble_ratio{", `soliton_worker_id="3"`,
		"soliton_link_io_bytes_total{", "soliton_recovery_phase_duration_seconds_bucket{", `soliton_recovery_phase_name="query"`, "soliton_mirror_lag{",
		"soliton_collective_duration_seconds_sum{", "hw_energy_joules_total{", `hw_id="GPU 0"`, "soliton_device_frequency_hertz{",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("%s is not in\n%s", want, body)
		}
	}
	for line := range strings.Lines(body) {
		if strings.HasPrefix(line, "soliton_link_io_bytes_total{") && !strings.HasSuffix(strings.TrimSpace(line), " 35") {
			t.Errorf("%s, want 35 bytes", line)
		}
		if strings.HasPrefix(line, "hw_energy_joules_total{") && !strings.HasSuffix(strings.TrimSpace(line), " 6") {
			t.Errorf("%s, want 6 J", line)
		}
	}
}

func TestEnvironment(t *testing.T) {
	const endpoint, protocol = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
	for _, v := range [][3]string{
		{protocol, "carrier pigeon", protocol + ` is "carrier pigeon": give http/protobuf or grpc`},
		{endpoint, "::::no URL", endpoint + ` is "::::no URL": give a URL`},
		{endpoint, "ftp://127.0.0.1:1", endpoint + ` is "ftp://127.0.0.1:1": give a URL`},
		{endpoint, "localhost:4318", endpoint + ` is "localhost:4318": give a URL`},
		{"OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "OTEL_EXPORTER_OTLP_*: parse duration"},
		{"OTEL_EXPORTER_OTLP_HEADERS", "secret", "OTEL_EXPORTER_OTLP_*: parse headers: missing '="},
		{"OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "OTEL_EXPORTER_OTLP_*: read tls ca cert file"},
	} {
		t.Run(v[0], func(t *testing.T) {
			t.Setenv(endpoint, "http://127.0.0.1:1")
			t.Setenv(v[0], v[1])
			_, err := New(t.Context())
			if err == nil || !strings.HasPrefix(err.Error(), v[2]) || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: %v", v[1], err)
			}
		})
	}
	t.Setenv(endpoint, "http://127.0.0.1:1")
	t.Setenv(protocol, "a")
	t.Setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "b")
	if _, err := New(t.Context()); err == nil || strings.Count(err.Error(), " is ") != 2 {
		t.Errorf("two faults: %v", err)
	}
	t.Setenv("OTEL_SDK_DISABLED", "true")
	if !Disabled() {
		t.Error("it is on")
	}
}

// A collector that is not there costs no time, and is told of at the end.
func TestNobodyListens(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
	tl := open(t)
	run := trace.RunOf("job", time.Unix(1, 0))
	tl.Begin(run, "", nil)
	tl.Spans([]trace.Span{{Context: run.Root(trace.Step, 1), Name: trace.Step, Start: time.Unix(1, 0), End: time.Unix(2, 0)}})
	if err := tl.Close(); err == nil {
		t.Error("no error tells that nothing came")
	}
}
