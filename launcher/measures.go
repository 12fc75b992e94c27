package main

import (
	"context"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/observe/trace"
)

// relayed is the telemetry of an agent that leads, with the measures told to its supervisor as well,
// which serves them for the whole run.
type relayed struct {
	host.Telemetry
	out  *reporter
	term uint64
}

func (r relayed) Measure(m trace.Measure) {
	r.Telemetry.Measure(m)
	if x, err := reportOf(r.term, m); err == nil { // loss and times are finite
		r.out.show(x)
	}
}

// hostTelemetry begins the telemetry of an agent that leads in a term.
func hostTelemetry(ctx context.Context, a *assignment, out *reporter, term uint64) (host.Telemetry, error) {
	t, err := openTelemetry(ctx)
	if err != nil || t == nil || !a.Measures {
		return t, err
	}
	return relayed{t, out, term}, nil
}
