package rundir

import (
	"os"
	"path/filepath"
	"testing"
)

// Whatever the files of a run directory hold, they are read, or the error says why not.
func FuzzRead(f *testing.F) {
	lines := "{\"step\":1,\"loss\":2.5,\"val_loss\":3}\n{\"step\":2}\n{\"step\":3,"
	events := "{\"kind\":\"begin\",\"worker\":1}\n{\"kind\":\"lost\",\"worker\":1,\"host\":\"host-1\"}\n{\"kind\":\"recovered\",\"worker\":-1,\"step\":2,\"total_ms\":1,\"stall_ms\":null}\n"
	for i := range 8 {
		texts := [8]string{"{}", "null", lines, events, "{\"plan\":{}}\n", "[]", "{}", ""}
		if texts[i] = "x\n"; i == 0 {
			texts[0] = `{"program":"gpt","steps":9,"started":"2026-01-02T15:04:05Z"}`
		}
		f.Add([]byte(texts[0]), []byte(texts[1]), []byte(texts[2]), []byte(texts[3]), []byte(texts[4]), []byte(texts[5]), []byte(texts[6]))
	}
	f.Fuzz(func(t *testing.T, job, summary, metrics, events, plans, data, workers []byte) {
		dir := t.TempDir()
		for name, text := range map[string][]byte{
			"job.json": job, "summary.json": summary, "metrics.jsonl": metrics, "events.jsonl": events, "plans.jsonl": plans, "data.json": data,
			"workers.json": workers, "lock": nil,
		} {
			if err := os.WriteFile(filepath.Join(dir, name), text, 0o666); err != nil {
				t.Fatal(err)
			}
		}
		_, readErr := Read(dir)
		_, historyErr := ReadHistory(dir)
		if historyErr == nil && readErr != nil {
			t.Fatalf("the history is read, and the run is not: %v", readErr)
		}
		d, _, err := Resume(dir)
		if readErr == nil && err != nil {
			t.Fatalf("read, but not resumed: %v", err)
		}
		if err != nil {
			return
		}
		if _, err := Read(dir); err != nil {
			t.Fatalf("resumed, but not read: %v", err)
		}
		if _, err := ReadWorkers(dir); err == nil && !Running(dir) {
			t.Fatal("the processes of a run that is over")
		}
		_, _ = d.ReadData()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
