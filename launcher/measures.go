package main

import (
	"context"
	"encoding/json"

	"github.com/soliton-train/soliton/internal/host"
	"github.com/soliton-train/soliton/internal/observe/trace"
)

// measureLine is a measure on an agent's standard output: one field is set.
type measureLine struct {
	StepDone     *trace.StepDone     `json:"step,omitempty"`
	WorkerStep   *trace.WorkerStep   `json:"worker_step,omitempty"`
	Traffic      *trace.Traffic      `json:"traffic,omitempty"`
	Collective   *trace.Collective   `json:"collective,omitempty"`
	RecoveryDone *trace.RecoveryDone `json:"recovery,omitempty"`
	MirrorLag    *trace.MirrorLag    `json:"mirror_lag,omitempty"`
	Device       *trace.Device       `json:"device,omitempty"`
}

func lineOf(m trace.Measure) (l measureLine) {
	switch m := m.(type) {
	case trace.StepDone:
		l.StepDone = &m
	case trace.WorkerStep:
		l.WorkerStep = &m
	case trace.Traffic:
		l.Traffic = &m
	case trace.Collective:
		l.Collective = &m
	case trace.RecoveryDone:
		l.RecoveryDone = &m
	case trace.MirrorLag:
		l.MirrorLag = &m
	case trace.Device:
		l.Device = &m
	}
	return l
}

// measure returns what the line holds, nil for nothing.
func (l measureLine) measure() trace.Measure {
	switch {
	case l.StepDone != nil:
		return *l.StepDone
	case l.WorkerStep != nil:
		return *l.WorkerStep
	case l.Traffic != nil:
		return *l.Traffic
	case l.Collective != nil:
		return *l.Collective
	case l.RecoveryDone != nil:
		return *l.RecoveryDone
	case l.MirrorLag != nil:
		return *l.MirrorLag
	case l.Device != nil:
		return *l.Device
	}
	return nil
}

// relayed is the telemetry of an agent that leads, with the measures told to its supervisor as well,
// which serves them for the whole run.
type relayed struct {
	host.Telemetry
	out  *reporter
	term uint64
}

func (r relayed) Measure(m trace.Measure) {
	r.Telemetry.Measure(m)
	if text, err := json.Marshal(lineOf(m)); err == nil { // loss and times are finite
		r.out.show(report{Term: r.term, Kind: reportMeasure, Event: text})
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
