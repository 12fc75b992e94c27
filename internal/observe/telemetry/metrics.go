package telemetry

import (
	"context"
	"errors"
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

// Board has the instruments, and serves what they measure. Names and units follow the semantic conventions: dots between
// words, seconds, bytes as By, counts of things in braces.
type Board struct {
	mu       sync.Mutex
	provider *sdkmetric.MeterProvider
	handler  http.Handler

	stepDuration metric.Float64Histogram
	tokens       metric.Int64Counter
	loss         metric.Float64Gauge
	workers      metric.Int64Gauge
	bubble       metric.Float64Gauge
	linkIO       metric.Int64Counter
	collective   metric.Float64Histogram
	collectiveIO metric.Int64Counter
	recovery     metric.Float64Histogram
	phase        metric.Float64Histogram
	recomputed   metric.Int64Counter
	mirrorLag    metric.Int64Gauge
	frequency    metric.Float64Gauge
	energy       metric.Float64Counter
	joules       map[string]float64 // what was counted of each device
	links        map[[2]int]int64   // what was counted of each
}

// keyCollective and keyPhase are attributes of measures alone.
const (
	keyCollective = "soliton.collective.name"
	keyPhase      = "soliton.recovery.phase.name"
)

// maxLinks bounds the links that are counted apart.
const maxLinks = 1 << 16

// maxDevices bounds the devices that are counted apart.
const maxDevices = 1 << 12

func newMetrics(res *resource.Resource, remote sdkmetric.Reader) (*Board, error) {
	registry := prometheus.NewRegistry()
	prom, err := exporter.New(exporter.WithRegisterer(registry))
	if err != nil {
		return nil, err
	}
	opts := []sdkmetric.Option{sdkmetric.WithResource(res), sdkmetric.WithReader(prom)}
	if remote != nil {
		opts = append(opts, sdkmetric.WithReader(remote))
	}
	m := &Board{
		provider: sdkmetric.NewMeterProvider(opts...), links: make(map[[2]int]int64), joules: make(map[string]float64),
		handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}),
	}
	meter := m.provider.Meter(scope)
	var errs []error
	seconds := func(name, what string, borders ...float64) metric.Float64Histogram {
		h, err := meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(what), metric.WithExplicitBucketBoundaries(borders...))
		errs = append(errs, err)
		return h
	}
	long := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25, 60}
	short := []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	m.stepDuration = seconds("soliton.step.duration", "Wall time of a step, without evaluation.", long...)
	m.tokens = instrument(&errs, meter.Int64Counter, "soliton.step.tokens", "{token}", "Targets of committed steps.")
	m.loss = instrument(&errs, meter.Float64Gauge, "soliton.step.loss", "1", "Mean training loss of the newest step.")
	m.workers = instrument(&errs, meter.Int64Gauge, "soliton.worker.count", "{worker}", "Workers of the newest step's plan.")
	m.bubble = instrument(&errs, meter.Float64Gauge, "soliton.worker.bubble.ratio", "1", "Share of the newest step in which a worker did not compute.")
	m.linkIO = instrument(&errs, meter.Int64Counter, "soliton.link.io", "By", "Bytes of messages from one worker to another.")
	m.collective = seconds("soliton.collective.duration", "Time of an operation of a group on a worker, in sampled steps.", short...)
	m.collectiveIO = instrument(&errs, meter.Int64Counter, "soliton.collective.io", "By", "Bytes of the operands of reductions, and of exchanges of which commits are one, that workers brought into them.")
	m.recovery = seconds("soliton.recovery.duration", "From a worker's death until all others have work again.", short...)
	m.phase = seconds("soliton.recovery.phase.duration", "The same, by phases.", short...)
	m.recomputed = instrument(&errs, meter.Int64Counter, "soliton.recovery.recomputed", "{micro_batch}", "Micro-batches in stages that ran again.")
	m.mirrorLag = instrument(&errs, meter.Int64Gauge, "soliton.mirror.lag", "{step}", "Steps for which some shard has had fewer mirrors than it should.")
	m.frequency = instrument(&errs, meter.Float64Gauge, "soliton.device.frequency", "Hz", "Clock of a device that workers compute on.")
	m.energy = instrument(&errs, meter.Float64Counter, "hw.energy", "J", "Energy that a device has drawn, from when the run looks after its clock.")
	return m, errors.Join(errs...)
}

// instrument makes an instrument of any kind but a histogram, and adds the error that it meets.
func instrument[I, O any](errs *[]error, kind func(name string, options ...O) (I, error), name, unit, what string) I {
	i, err := kind(name, any(metric.WithUnit(unit)).(O), any(metric.WithDescription(what)).(O))
	*errs = append(*errs, err)
	return i
}

// Handler serves the measures as Prometheus reads them.
func (m *Board) Handler() http.Handler { return m.handler }

// Measure takes in a measure; nil is none.
func (m *Board) Measure(x trace.Measure) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ctx := context.Background()
	switch x := x.(type) {
	case trace.StepDone:
		m.stepDuration.Record(ctx, x.Seconds)
		m.tokens.Add(ctx, max(x.Tokens, 0))
		m.loss.Record(ctx, x.Loss)
		m.workers.Record(ctx, int64(x.Workers))
	case trace.WorkerStep:
		if x.Seconds > 0 {
			m.bubble.Record(ctx, min(max(1-x.Compute/x.Seconds, 0), 1), metric.WithAttributes(attribute.Int(trace.KeyWorker, x.Worker)))
		}
		m.collectiveIO.Add(ctx, max(x.Reduced, 0), metric.WithAttributes(attribute.String(keyCollective, trace.Reduce)))
		m.collectiveIO.Add(ctx, max(x.Exchanged, 0), metric.WithAttributes(attribute.String(keyCollective, trace.Exchange)))
	case trace.Traffic:
		key := [2]int{x.From, x.To}
		was, known := m.links[key]
		if !known && len(m.links) >= maxLinks {
			return
		}
		if m.links[key] = x.Bytes; x.Bytes < was {
			was = 0 // another incarnation
		}
		m.linkIO.Add(ctx, max(x.Bytes-was, 0), metric.WithAttributes(attribute.Int(trace.KeyWorker, x.From), attribute.Int(trace.KeyPeer, x.To)))
	case trace.Collective:
		m.collective.Record(ctx, x.Seconds, metric.WithAttributes(attribute.String(keyCollective, x.Name)))
	case trace.RecoveryDone:
		m.recovery.Record(ctx, x.Seconds, metric.WithAttributes(attribute.Bool(trace.KeyRollback, x.Rollback)))
		for i, s := range x.Phases {
			m.phase.Record(ctx, s, metric.WithAttributes(attribute.String(keyPhase, trace.Phases[i])))
		}
		m.recomputed.Add(ctx, int64(max(x.Recomputed, 0)))
	case trace.Device:
		was, known := m.joules[x.Name]
		if !known && len(m.joules) >= maxDevices {
			return
		}
		of := metric.WithAttributes(attribute.String("hw.id", x.Name), attribute.String("hw.type", x.Kind), attribute.Bool("soliton.device.emulated", x.Emulated))
		m.frequency.Record(ctx, x.Hertz, of)
		if m.joules[x.Name] = x.Joules; x.Joules < was {
			was = 0 // it was opened again
		}
		m.energy.Add(ctx, x.Joules-was, of)
	case trace.MirrorLag:
		m.mirrorLag.Record(ctx, int64(x.Steps))
	}
}
