package rundir

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// ID identifies what the job computes: equal jobs have equal states after every step. It is
// made of model, optimizer, schedule, seed, batches, clipping, steps and data, and of what the run was before, up to which step; not of
// what changes no bit, such as the number of workers. It is 64 hexadecimal digits.
func (j Job) ID() string {
	type before struct {
		ID    string
		Until int
	}
	var lineage []before
	for _, a := range j.Lineage {
		lineage = append(lineage, before{a.ID, a.Until})
	}
	text, err := json.Marshal(struct {
		Model                          string
		Config                         json.RawMessage
		Layers                         int
		Parameters                     int64
		Steps, GlobalBatch, MicroBatch int
		Seed                           uint64
		Optimizer, Schedule            string
		ClipNorm                       float64
		Init, Data                     string
		Samples                        int64
		Lineage                        []before `json:",omitempty"`
		InitOptimizer                  string   `json:",omitempty"`
	}{
		j.Model, j.config(), j.Layers, j.Parameters, j.Steps, j.GlobalBatch, j.MicroBatch,
		j.Seed, j.Optimizer, j.Schedule, j.ClipNorm, j.InitSHA256, j.DataSHA256, j.Samples,
		lineage, j.InitOptimizerSHA256,
	})
	if err != nil {
		panic(fmt.Sprintf("rundir: %v", err)) // plain values
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// config is ModelConfig in its shortest form, which job.json does not have it in.
func (j Job) config() json.RawMessage {
	var b bytes.Buffer
	if json.Compact(&b, j.ModelConfig) != nil || b.Len() == 0 {
		return json.RawMessage("null")
	}
	return b.Bytes()
}

// Plain returns the job as it is before it is written to a file and after it is read.
func (j Job) Plain() Job {
	j.ModelConfig = j.config()
	j.Args = empty(j.Args)
	return j
}
