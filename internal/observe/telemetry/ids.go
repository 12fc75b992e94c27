package telemetry

import (
	"context"
	"crypto/rand"

	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

// ids gives spans the identities that they were made with, and others at random.
type ids struct{}

func (ids) NewIDs(ctx context.Context) (oteltrace.TraceID, oteltrace.SpanID) {
	c, _ := ctx.Value(wanted{}).(trace.Context)
	if c.Trace == (trace.ID{}) {
		_, _ = rand.Read(c.Trace[:]) // never fails
	}
	return oteltrace.TraceID(c.Trace), ids{}.NewSpanID(ctx, oteltrace.TraceID(c.Trace))
}

func (ids) NewSpanID(ctx context.Context, _ oteltrace.TraceID) oteltrace.SpanID {
	c, _ := ctx.Value(wanted{}).(trace.Context)
	for c.Span == (trace.SpanID{}) {
		_, _ = rand.Read(c.Span[:]) // never fails
	}
	return oteltrace.SpanID(c.Span)
}
