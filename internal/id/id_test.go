package id

import (
	"encoding/json"
	"testing"
)

// The JSON forms are in files of runs and checkpoints that exist.
func TestJSON(t *testing.T) {
	for want, v := range map[string]any{
		`{"worker":3,"incarnation":1}`:    Session{Worker: 3, Incarnation: 1},
		`{"generation":2,"n":17}`:         Version{Generation: 2, N: 17},
		`{"layer":4,"lo":4096,"hi":8192}`: Range{Layer: 4, Lo: 4096, Hi: 8192},
		`{"term":2,"attempt":5}`:          Ballot{Term: 2, Attempt: 5},
		`{"term":2,"n":5}`:                Fill{Term: 2, N: 5},
		`{"step":7,"gate":1}`:             Point{Step: 7, Gate: Evaluated},
		`{"step":7,"gate":0,"repair":2}`:  Point{Step: 7, Repair: 2},
		`{"layer":0,"lo":0,"hi":0,"worker":-1}`: struct {
			Range
			Worker WorkerID `json:"worker"`
		}{Worker: -1},
	} {
		if b, err := json.Marshal(v); err != nil || string(b) != want {
			t.Errorf("%#v is %s (%v), want %s", v, b, err, want)
		}
	}
}
