package telemetry

import (
	"testing"
	"time"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

// BenchmarkSpan is what a span costs the launcher, from the agent's hands to a line of the file.
func BenchmarkSpan(b *testing.B) {
	tl, err := New(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	run := trace.RunOf("job", time.Unix(1, 0))
	tl.begin(begin{run: run, file: func([]byte) error { return nil }})
	s := trace.Span{
		Context: trace.Context{Trace: run.Root(trace.Step, 1).Trace}, Parent: run.Root(trace.Step, 1).Span, Name: trace.Forward,
		Start: time.Unix(1, 0), End: time.Unix(2, 0), Attrs: []trace.Attr{{Key: trace.KeyStage, Value: 1}, {Key: trace.KeyMicro, Value: 2}},
	}
	for b.Loop() {
		tl.span(&s)
	}
	if err := tl.Close(); err != nil {
		b.Fatal(err)
	}
}
