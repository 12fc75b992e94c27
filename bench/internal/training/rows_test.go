package training

import (
	"testing"

	"github.com/soliton-train/soliton/bench/internal/report"
)

// What a comparison prints, it records, with both sides and a ratio.
func TestRows(t *testing.T) {
	rec := &report.Recorder{}
	if err := bandwidth(2, 2, rec); err != nil {
		t.Fatal(err)
	}
	if err := Keep([]string{"-dir", t.TempDir(), "-parts", "disk,input", "-state", "4", "-samples", "200"}, rec); err != nil {
		t.Fatal(err)
	}
	if len(rec.Rows) != 2+2+7 {
		t.Errorf("%d rows", len(rec.Rows))
	}
	for _, r := range rec.Rows {
		if r.Comparison == "" || r.Case == "" || r.Ours == "" || r.Theirs == "" || r.Unit == "" || r.OfRatio().N != len(r.Samples) {
			t.Errorf("%+v", r)
		}
	}
}
