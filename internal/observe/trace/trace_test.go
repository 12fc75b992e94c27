package trace

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestContext(t *testing.T) {
	run := RunOf("job", time.Unix(1, 2))
	c := run.Root(Recovery, 1, 2)
	if c == run.Root(Recovery, 2, 1) || c == run.Root(Step, 1, 2) || c == RunOf("job", time.Unix(1, 3)).Root(Recovery, 1, 2) || c != run.Root(Recovery, 1, 2) {
		t.Error("roots do not follow from what they are about")
	}
	if got, err := ParseContext(c.String()); err != nil || got != c {
		t.Errorf("%v: %v, %v", c, got, err)
	}
	if got, err := ParseContext((Context{}).String()); err != nil || got != (Context{}) {
		t.Errorf("none: %v, %v", got, err)
	}
	for _, s := range []string{
		"x", "00-1-2-01", c.String() + "0", strings.Replace(c.String(), "00-", "01-", 1),
		"00-00000000000000000000000000000000-0000000000000001-01", "00-zz000000000000000000000000000000-0000000000000001-01",
	} {
		if got, err := ParseContext(s); err == nil || got != (Context{}) {
			t.Errorf("%q: %v", s, got)
		}
	}
}

func TestRead(t *testing.T) {
	line := func(name, parent string) string {
		n, text := Int(3), "why"
		d := Data{ResourceSpans: []ResourceSpans{{
			Resource: Resource{Attributes: []KeyValue{{KeyWorker, Value{Int: &n}}}},
			ScopeSpans: []ScopeSpans{{Spans: []SpanJSON{{
				TraceID: "0102030405060708090a0b0c0d0e0f10", SpanID: "0102030405060708", ParentSpanID: parent, Name: name, Start: 5, End: 9,
				Attributes: []KeyValue{{KeyStep, Value{Int: &n}}, {KeyCause, Value{String: &text}}},
				Links:      []LinkJSON{{TraceID: "0102030405060708090a0b0c0d0e0f11", SpanID: "0102030405060709", Attributes: []KeyValue{{"x", Value{String: &text}}}}},
				Status:     Status{Message: "bad", Code: 2},
			}}}},
		}}}
		b, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		return string(b) + "\n"
	}
	whole := line("a", "") + line("b", "0102030405060707")
	if !strings.Contains(whole, `"startTimeUnixNano":"5"`) || !strings.Contains(whole, `"intValue":"3"`) {
		t.Errorf("not OTLP JSON: %s", whole)
	}
	var got []Span
	if err := Read(strings.NewReader(whole+whole[:50]+"\n"+line("c", "")+whole[:70]), func(s Span) { got = append(got, s) }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got[2].Name != "c" {
		t.Fatalf("%+v", got)
	}
	s := got[1]
	if s.Worker != 3 || s.Parent == (SpanID{}) || s.Int(KeyStep, 0) != 3 || s.Text(KeyCause) != "why" || s.Error != "bad" ||
		!reflect.DeepEqual(s.Links[0].Why, "why") || s.End.Sub(s.Start) != 4 {
		t.Errorf("%+v", s)
	}
	if s.Int("none", -1) != -1 || s.Text("none") != "" {
		t.Error("an attribute that is not there")
	}
	if err := Read(strings.NewReader(strings.Replace(whole, "0102030405060708090a0b0c0d0e0f10", "x", 1)), func(Span) {}); err == nil {
		t.Error("a trace that has no identity was read")
	}
}

func FuzzRead(f *testing.F) {
	f.Add(`{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"0102030405060708090a0b0c0d0e0f10","spanId":"0102030405060708"}]}]}]}`)
	f.Fuzz(func(t *testing.T, s string) { _ = Read(strings.NewReader(s), func(Span) {}) })
}
