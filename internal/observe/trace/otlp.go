package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"
)

type (
	// Data is a line of traces.jsonl, in OTLP's JSON encoding of spans as far as a run uses
	// it: identities are hexadecimal, numbers of 64 bits are strings.
	Data struct {
		ResourceSpans []ResourceSpans `json:"resourceSpans"`
	}
	// ResourceSpans are spans of one process.
	ResourceSpans struct {
		Resource   Resource     `json:"resource"`
		ScopeSpans []ScopeSpans `json:"scopeSpans"`
		SchemaURL  string       `json:"schemaUrl,omitempty"`
	}
	// Resource is a process.
	Resource struct {
		Attributes []KeyValue `json:"attributes,omitempty"`
	}
	// ScopeSpans are spans of one library.
	ScopeSpans struct {
		Scope     Scope      `json:"scope"`
		Spans     []SpanJSON `json:"spans"`
		SchemaURL string     `json:"schemaUrl,omitempty"`
	}
	// Scope is a library.
	Scope struct {
		Name    string `json:"name,omitempty"`
		Version string `json:"version,omitempty"`
	}
	// SpanJSON is a span.
	SpanJSON struct {
		TraceID      string     `json:"traceId"`
		SpanID       string     `json:"spanId"`
		ParentSpanID string     `json:"parentSpanId,omitempty"`
		Flags        uint32     `json:"flags,omitempty"`
		Name         string     `json:"name"`
		Kind         int32      `json:"kind,omitempty"`
		Start        Nanos      `json:"startTimeUnixNano"`
		End          Nanos      `json:"endTimeUnixNano"`
		Attributes   []KeyValue `json:"attributes,omitempty"`
		Links        []LinkJSON `json:"links,omitempty"`
		Status       Status     `json:"status"`
	}
	// LinkJSON points to another span.
	LinkJSON struct {
		TraceID    string     `json:"traceId"`
		SpanID     string     `json:"spanId"`
		Attributes []KeyValue `json:"attributes,omitempty"`
		Flags      uint32     `json:"flags,omitempty"`
	}
	// Status says how it ended.
	Status struct {
		Message string `json:"message,omitempty"`
		Code    int32  `json:"code,omitempty"` // 2: error
	}
	// KeyValue is an attribute.
	KeyValue struct {
		Key   string `json:"key"`
		Value Value  `json:"value"`
	}
	// Value is one of an attribute; one field is set.
	Value struct {
		String *string  `json:"stringValue,omitempty"`
		Bool   *bool    `json:"boolValue,omitempty"`
		Int    *Int     `json:"intValue,omitempty"`
		Double *float64 `json:"doubleValue,omitempty"`
	}
	// Int is a number that JSON holds as a string.
	Int int64
	// Nanos is a point in time in nanoseconds since 1970, which JSON holds as a string.
	Nanos uint64
)

// MarshalJSON implements [json.Marshaler].
func (n Int) MarshalJSON() ([]byte, error) { return fmt.Appendf(nil, `"%d"`, int64(n)), nil }

// MarshalJSON implements [json.Marshaler].
func (n Nanos) MarshalJSON() ([]byte, error) { return fmt.Appendf(nil, `"%d"`, uint64(n)), nil }

// UnmarshalJSON implements [json.Unmarshaler]; a bare number is taken, too.
func (n *Int) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseInt(unquote(b), 10, 64)
	*n = Int(v)
	return err
}

// UnmarshalJSON implements [json.Unmarshaler]; a bare number is taken, too.
func (n *Nanos) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseUint(unquote(b), 10, 63)
	*n = Nanos(v)
	return err
}

func unquote(b []byte) string {
	if len(b) > 1 && b[0] == '"' && b[len(b)-1] == '"' {
		b = b[1 : len(b)-1]
	}
	return string(b)
}

// Time returns the point in time.
func (n Nanos) Time() time.Time { return time.Unix(0, int64(n)) }

// maxLine bounds a line of traces.jsonl that is read.
const maxLine = 64 << 20

// Read calls each with every span of traces.jsonl, in its order. Lines that were cut off, as their
// writer died, are left out.
func Read(r io.Reader, each func(Span)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		var d Data
		if json.Unmarshal(lines.Bytes(), &d) != nil {
			continue
		}
		for _, rs := range d.ResourceSpans {
			worker, incarnation := Agent, 0
			for _, a := range rs.Resource.Attributes {
				switch {
				case a.Key == KeyWorker && a.Value.Int != nil:
					worker = int(*a.Value.Int)
				case a.Key == KeyIncarnated && a.Value.Int != nil:
					incarnation = int(*a.Value.Int)
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, j := range ss.Spans {
					s, err := j.span()
					if err != nil {
						return fmt.Errorf("line %d: %w", n, err)
					}
					s.Worker, s.Incarnation = worker, incarnation
					each(s)
				}
			}
		}
	}
	return lines.Err()
}

// span reads a span.
func (j SpanJSON) span() (s Span, err error) {
	if s.Context, err = ParseContext("00-" + j.TraceID + "-" + j.SpanID + "-01"); err != nil {
		return s, err
	}
	if j.ParentSpanID != "" {
		parent, err := ParseContext("00-" + j.TraceID + "-" + j.ParentSpanID + "-01")
		if err != nil {
			return s, err
		}
		s.Parent = parent.Span
	}
	s.Name, s.Start, s.End = j.Name, j.Start.Time(), j.End.Time()
	if j.Status.Code == 2 {
		s.Error = j.Status.Message
	}
	for _, a := range j.Attributes {
		s.Attrs = append(s.Attrs, Attr{a.Key, a.Value.any()})
	}
	for _, l := range j.Links {
		c, err := ParseContext("00-" + l.TraceID + "-" + l.SpanID + "-01")
		if err != nil {
			return s, err
		}
		link := Link{Context: c}
		for _, a := range l.Attributes {
			if a.Value.String != nil {
				link.Why = *a.Value.String
			}
		}
		s.Links = append(s.Links, link)
	}
	return s, nil
}

func (v Value) any() any {
	switch {
	case v.String != nil:
		return *v.String
	case v.Bool != nil:
		return *v.Bool
	case v.Int != nil:
		return int(*v.Int)
	case v.Double != nil:
		return *v.Double
	}
	return nil
}

// Int returns an attribute that is a number, or other.
func (s *Span) Int(key string, other int) int { return attribute(s, key, other) }

// True reports whether an attribute is there and true.
func (s *Span) True(key string) bool { return attribute(s, key, false) }

// Text returns an attribute that is text, or "".
func (s *Span) Text(key string) string { return attribute(s, key, "") }

func attribute[T any](s *Span, key string, other T) T {
	for _, a := range s.Attrs {
		if v, ok := a.Value.(T); ok && a.Key == key {
			return v
		}
	}
	return other
}
