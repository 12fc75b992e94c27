package telemetry

import (
	"context"
	"encoding/json"
	"slices"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/soliton-train/soliton/internal/observe/trace"
)

// file writes spans as lines of OTLP JSON. It is the client of an exporter.
type file struct {
	add  func(line []byte) error
	size int
}

func (*file) Start(context.Context) error { return nil }
func (*file) Stop(context.Context) error  { return nil }

// UploadTraces writes a line. Where the file has its size, spans of steps are left out first.
func (f *file) UploadTraces(_ context.Context, spans []*tracepb.ResourceSpans) error {
	d := trace.Data{}
	for _, rs := range spans {
		if out := convert(rs, f.size > maxFile); len(out.ScopeSpans) > 0 {
			d.ResourceSpans = append(d.ResourceSpans, out)
		}
	}
	if len(d.ResourceSpans) == 0 {
		return nil
	}
	line, err := json.Marshal(d)
	if err != nil || f.size+len(line) > maxFileRecoveries {
		return err
	}
	f.size += len(line)
	return f.add(line)
}

// ofSteps reports whether a span belongs to a step's trace.
func ofSteps(s *tracepb.Span) bool {
	return s.Name != trace.Last && s.Name != trace.Answer && !slices.Contains(trace.Phases[:], s.Name) &&
		!slices.ContainsFunc(s.Attributes, func(a *commonpb.KeyValue) bool { return a.Key == trace.KeyCause })
}

func convert(rs *tracepb.ResourceSpans, less bool) trace.ResourceSpans {
	out := trace.ResourceSpans{Resource: trace.Resource{Attributes: attributes(rs.Resource.GetAttributes())}, SchemaURL: rs.SchemaUrl}
	for _, ss := range rs.ScopeSpans {
		s := trace.ScopeSpans{SchemaURL: ss.SchemaUrl, Scope: trace.Scope{Name: ss.Scope.GetName(), Version: ss.Scope.GetVersion()}}
		for _, sp := range ss.Spans {
			if !less || !ofSteps(sp) {
				s.Spans = append(s.Spans, spanOf(sp))
			}
		}
		if len(s.Spans) > 0 {
			out.ScopeSpans = append(out.ScopeSpans, s)
		}
	}
	return out
}

func spanOf(s *tracepb.Span) trace.SpanJSON {
	out := trace.SpanJSON{
		TraceID: trace.ID(s.TraceId).String(), SpanID: trace.SpanID(s.SpanId).String(), Flags: s.Flags, Name: s.Name, Kind: int32(s.Kind),
		Start: trace.Nanos(s.StartTimeUnixNano), End: trace.Nanos(s.EndTimeUnixNano), Attributes: attributes(s.Attributes),
		Status: trace.Status{Message: s.Status.GetMessage(), Code: int32(s.Status.GetCode())},
	}
	if len(s.ParentSpanId) > 0 {
		out.ParentSpanID = trace.SpanID(s.ParentSpanId).String()
	}
	for _, l := range s.Links {
		out.Links = append(out.Links, trace.LinkJSON{
			TraceID: trace.ID(l.TraceId).String(), SpanID: trace.SpanID(l.SpanId).String(), Attributes: attributes(l.Attributes), Flags: l.Flags,
		})
	}
	return out
}

// attributes leaves out what no run has: lists, maps and bytes.
func attributes(all []*commonpb.KeyValue) (out []trace.KeyValue) {
	for _, a := range all {
		kv := trace.KeyValue{Key: a.Key}
		switch v := a.Value.GetValue().(type) {
		case *commonpb.AnyValue_StringValue:
			kv.Value.String = &v.StringValue
		case *commonpb.AnyValue_BoolValue:
			kv.Value.Bool = &v.BoolValue
		case *commonpb.AnyValue_IntValue:
			n := trace.Int(v.IntValue)
			kv.Value.Int = &n
		case *commonpb.AnyValue_DoubleValue:
			kv.Value.Double = &v.DoubleValue
		default:
			continue
		}
		out = append(out, kv)
	}
	return out
}
