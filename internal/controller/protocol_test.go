package controller

import (
	"reflect"
	"strings"
	"testing"
)

// TestArriveAsSent holds that every field of what travels between agent and workers does, the default values too.
func TestArriveAsSent(t *testing.T) {
	var r, r2 Report
	var o, o2 Order
	var f, f2 Fill
	for _, v := range []any{&r, &o, &f} {
		sample(reflect.ValueOf(v).Elem())
	}
	for range 2 {
		b, err := r.Encode()
		if err == nil {
			r2, err = ParseReport(b)
		}
		if err != nil || !reflect.DeepEqual(r, r2) {
			t.Errorf("report %+v arrived as %+v, %v", r, r2, err)
		}
		if b, err = o.Encode(); err == nil {
			o2, err = ParseOrder(b)
		}
		if err != nil || !reflect.DeepEqual(o, o2) {
			t.Errorf("order %+v arrived as %+v, %v", o, o2, err)
		}
		if b, err = f.Encode(); err == nil {
			f2, err = ParseFill(b)
		}
		if err != nil || !reflect.DeepEqual(f, f2) {
			t.Errorf("fill %+v arrived as %+v, %v", f, f2, err)
		}
		r, o, f = Report{}, Order{}, Fill{}
	}
}

// TestParseRefuses holds that what comes from outside is an error, not a panic or much memory.
func TestParseRefuses(t *testing.T) {
	for name, b := range map[string]string{
		"nothing":       "",
		"text":          `{"plan":{}}`,
		"deep":          strings.Repeat("\x91", 100),
		"long array":    "\x81\xa5peers\xdd\xff\xff\xff\xff",
		"cut short":     "\x81\xa4plan",
		"another type":  "\x81\xa5epoch\xa1x",
		"more than one": "\x80\x80",
	} {
		if o, err := ParseOrder([]byte(b)); err == nil {
			t.Errorf("%s: taken as %+v", name, o)
		}
	}
}
