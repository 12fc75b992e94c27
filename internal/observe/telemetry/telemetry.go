// Package telemetry brings spans and measures of a run out of its process, through the
// OpenTelemetry SDK: spans to a file of lines as OTLP JSON, and both to a collector where the
// standard variables OTEL_EXPORTER_OTLP_* name one, and serves measures through [Telemetry.Handler].
// OTEL_SDK_DISABLED=true turns all of it off.
//
// A goroutine of its own does the work, behind a queue of bounded length: callers never wait. What
// does not fit any more is dropped and counted. A collector that cannot be reached
// costs memory up to a bound, and no time.
//
// Only the launcher links this package; workers send their spans to the agent in messages.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

const (
	scope = "github.com/soliton-train/soliton"

	// maxQueue bounds what waits to be worked off: as many pieces of news.
	maxQueue = 4096

	// maxSessions bounds the sessions of workers that have a resource of their own.
	maxSessions = 1 << 14

	// maxText bounds an attribute in bytes.
	maxText = 1 << 10

	// closeTime bounds how long the end of a run waits for a collector.
	closeTime = 3 * time.Second

	// maxFile and maxFileRecoveries bound the file. Beyond the first, only what
	// belongs to recoveries is written; beyond the second, nothing is.
	maxFile           = 64 << 20
	maxFileRecoveries = 80 << 20
)

// Telemetry takes in the spans and measures of one run. Its methods may be called from any goroutine.
type Telemetry struct {
	queue   chan any
	done    chan struct{}
	dropped atomic.Int64
	failed  failures

	close sync.Once
	quit  chan struct{}

	*Board
	remote otlptrace.Client // nil for none

	// All below is the goroutine's.
	named      bool
	host       *resource.Resource
	run        string
	providers  map[session]oteltrace.Tracer
	processors []sdktrace.SpanProcessor
}

type session struct{ worker, incarnation int }

// begin says which run it is.
type begin struct {
	run     trace.Run
	program string
	file    func(line []byte) error
}

// Disabled reports whether the environment turns telemetry off.
func Disabled() bool {
	off, _ := strconv.ParseBool(os.Getenv("OTEL_SDK_DISABLED"))
	return off
}

// New reads the environment and begins. Its error says which variable is wrong and what
// would be right.
func New(ctx context.Context) (*Telemetry, error) {
	t := &Telemetry{queue: make(chan any, maxQueue), done: make(chan struct{}), quit: make(chan struct{}), providers: make(map[session]oteltrace.Tracer)}
	// A collector that cannot be reached must not write over the view of the run.
	otel.SetErrorHandler(&t.failed)
	res, err := hostResource(ctx)
	if err != nil {
		return nil, err
	}
	t.host = res
	var config failures
	otel.SetLogger(logr.New(configLog{&config}))
	reader, wrong := metricReader(ctx)
	t.remote, err = traceClient()
	otel.SetLogger(logr.New(configLog{&t.failed}))
	switch {
	case err != nil && wrong != nil && err.Error() == wrong.Error():
	case err != nil || wrong != nil:
		err = errors.Join(err, wrong)
	case config.first != nil:
		err = fmt.Errorf("OTEL_EXPORTER_OTLP_*: %w", config.first)
	}
	if err != nil {
		if reader != nil {
			_ = reader.Shutdown(ctx)
		}
		return nil, err
	}
	if t.Board, err = newMetrics(res, reader); err != nil {
		return nil, err
	}
	go t.loop()
	return t, nil
}

// hostResource describes this host, as far as it is not for the environment to say.
func hostResource(ctx context.Context) (*resource.Resource, error) {
	res, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(),
		resource.WithAttributes(semconv.ServiceName("soliton")), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return res, nil
}

// NewBoard returns a board of measures that others have taken. It brings them nowhere else.
func NewBoard(ctx context.Context) (*Board, error) {
	res, err := hostResource(ctx)
	if err != nil {
		return nil, err
	}
	return newMetrics(res, nil)
}

// Begin names the run, before its first span or measure. file appends a line to traces.jsonl;
// it is nil for a run without files.
func (t *Telemetry) Begin(run trace.Run, program string, file func(line []byte) error) {
	t.put(begin{run, program, file})
}

// Spans takes in spans that have ended.
func (t *Telemetry) Spans(spans []trace.Span) { t.put(spans) }

// Measure takes in a measure.
func (t *Telemetry) Measure(m trace.Measure) { t.put(m) }

func (t *Telemetry) put(news any) {
	select {
	case <-t.quit:
	case t.queue <- news:
	default:
		t.dropped.Add(1)
	}
}

// Close writes out everything and ends. It returns what went wrong on the way, which no other call reports.
func (t *Telemetry) Close() error {
	t.close.Do(func() { close(t.quit) })
	<-t.done
	err := t.failed.err()
	if n := t.dropped.Load(); n > 0 {
		err = errors.Join(err, fmt.Errorf("telemetry: %d pieces of news were dropped, as they came too fast", n))
	}
	return err
}

// loop works off what was told.
func (t *Telemetry) loop() {
	defer close(t.done)
	for {
		select {
		case news := <-t.queue:
			t.work(news)
		case <-t.quit:
			for len(t.queue) > 0 {
				t.work(<-t.queue)
			}
			t.end()
			return
		}
	}
}

func (t *Telemetry) end() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	for _, p := range t.processors {
		if err := p.Shutdown(ctx); err != nil {
			t.failed.Handle(err)
		}
	}
	if err := t.provider.Shutdown(ctx); err != nil {
		t.failed.Handle(err)
	}
}

func (t *Telemetry) work(news any) {
	switch news := news.(type) {
	case begin:
		if !t.named {
			t.begin(news)
		}
	case []trace.Span:
		for i := range news {
			t.span(&news[i])
		}
	case trace.Measure:
		t.Board.Measure(news)
	}
}

func (t *Telemetry) begin(b begin) {
	t.named, t.run = true, fmt.Sprintf("%x", b.run[:8])
	if b.program != "" {
		t.host, _ = resource.Merge(t.host, resource.NewSchemaless(attribute.String("soliton.program", short(b.program))))
	}
	add := func(c otlptrace.Client, opts ...sdktrace.BatchSpanProcessorOption) {
		e, err := otlptrace.New(context.Background(), c)
		if err != nil {
			t.failed.Handle(err)
			return
		}
		t.processors = append(t.processors, sdktrace.NewBatchSpanProcessor(e, opts...))
	}
	if b.file != nil {
		add(&file{add: b.file}, sdktrace.WithBlocking(), sdktrace.WithBatchTimeout(time.Second))
	}
	if t.remote != nil {
		add(t.remote, sdktrace.WithMaxQueueSize(1<<14), sdktrace.WithBatchTimeout(time.Second))
	}
}

// tracer returns that of a session, which has a resource of its own.
func (t *Telemetry) tracer(s session) oteltrace.Tracer {
	if tr := t.providers[s]; tr != nil {
		return tr
	}
	if len(t.providers) > maxSessions {
		t.dropped.Add(1)
		return nil
	}
	who := "agent"
	attrs := []attribute.KeyValue{}
	if s.worker != trace.Agent {
		who = fmt.Sprintf("worker-%d.%d", s.worker, s.incarnation)
		attrs = append(attrs, attribute.Int(trace.KeyWorker, s.worker), attribute.Int(trace.KeyIncarnated, s.incarnation))
	}
	attrs = append(attrs, semconv.ServiceInstanceID(t.run+"/"+who), attribute.String("soliton.run.id", t.run))
	res, err := resource.Merge(t.host, resource.NewSchemaless(attrs...))
	if err != nil {
		t.failed.Handle(err)
	}
	opts := []sdktrace.TracerProviderOption{
		sdktrace.WithIDGenerator(ids{}), sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithResource(res),
	}
	for _, p := range t.processors {
		opts = append(opts, sdktrace.WithSpanProcessor(p))
	}
	tr := sdktrace.NewTracerProvider(opts...).Tracer(scope)
	t.providers[s] = tr
	return tr
}

// wanted are the identities that a span is to get.
type wanted struct{}

// span makes a span that has ended.
func (t *Telemetry) span(s *trace.Span) {
	if len(t.processors) == 0 || s.Trace == (trace.ID{}) {
		return
	}
	tr := t.tracer(session{s.Worker, s.Incarnation})
	if tr == nil {
		return
	}
	ctx := context.WithValue(context.Background(), wanted{}, s.Context)
	opts := []oteltrace.SpanStartOption{oteltrace.WithTimestamp(s.Start)}
	if s.Parent == (trace.SpanID{}) {
		opts = append(opts, oteltrace.WithNewRoot())
	} else {
		ctx = oteltrace.ContextWithRemoteSpanContext(ctx, spanContext(trace.Context{Trace: s.Trace, Span: s.Parent}))
	}
	for _, a := range s.Attrs {
		opts = append(opts, oteltrace.WithAttributes(keyValue(a)))
	}
	for _, l := range s.Links {
		opts = append(opts, oteltrace.WithLinks(oteltrace.Link{
			SpanContext: spanContext(l.Context), Attributes: []attribute.KeyValue{attribute.String("soliton.link", l.Why)},
		}))
	}
	_, span := tr.Start(ctx, s.Name, opts...)
	if s.Error != "" {
		span.SetStatus(codes.Error, short(s.Error))
	}
	span.End(oteltrace.WithTimestamp(s.End))
}

func spanContext(c trace.Context) oteltrace.SpanContext {
	return oteltrace.NewSpanContext(oteltrace.SpanContextConfig{
		TraceID: oteltrace.TraceID(c.Trace), SpanID: oteltrace.SpanID(c.Span), TraceFlags: oteltrace.FlagsSampled, Remote: true,
	})
}

func keyValue(a trace.Attr) attribute.KeyValue {
	switch v := a.Value.(type) {
	case string:
		return attribute.String(a.Key, short(v))
	case int:
		return attribute.Int(a.Key, v)
	case int64:
		return attribute.Int64(a.Key, v)
	case float64:
		return attribute.Float64(a.Key, v)
	case bool:
		return attribute.Bool(a.Key, v)
	}
	return attribute.String(a.Key, short(fmt.Sprint(a.Value)))
}

func short(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.ToValidUTF8(s, "?")
}

// failures keeps the first error of the SDK, and counts the others.
type failures struct {
	mu    sync.Mutex
	first error
	more  int
}

// Handle implements otel.ErrorHandler.
func (f *failures) Handle(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.first == nil {
		f.first = err
	} else {
		f.more++
	}
}

func (f *failures) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.first == nil:
		return nil
	case f.more == 0:
		return fmt.Errorf("telemetry: %w", f.first)
	}
	return fmt.Errorf("telemetry: %w; and %d errors more", f.first, f.more)
}
