package session

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/soliton-train/soliton/internal/net/control"
)

// mayDiffer are the fields of a job that a worker may have for itself: the kernel
// path and the platform give the same bits, and the others are the agent's.
var mayDiffer = []string{"kernel", "platform", "reduction", "zero", "workers", "stages", "threads", "started", "command", "dir", "mirrors",
	"min_workers", "detect", "respawn", "no_digests", "reshape"}

// difference returns the first field, by its name in job.json, in which a worker's job
// is not that of another, and both values where they say something to people. The program
// comes first, as it explains all others.
func difference(a, b control.Ready) (field, values string) {
	ja, jb := reflect.ValueOf(a.Job), reflect.ValueOf(b.Job)
	program := a.Job.ProgramSHA256 != b.Job.ProgramSHA256
	for i := range ja.NumField() {
		name, _, _ := strings.Cut(ja.Type().Field(i).Tag.Get("json"), ",")
		if slices.Contains(mayDiffer, name) || program && name != "program_sha256" {
			continue
		}
		x, y := ja.Field(i).Interface(), jb.Field(i).Interface()
		if !reflect.DeepEqual(x, y) {
			return name, describe(name, x, y, a, b)
		}
	}
	// The digests above cover the data, where they are honest.
	if !slices.Equal(a.Data, b.Data) {
		return "data", otherFile(a, b)
	}
	same := func(x, y control.Layer) bool { return x.Name == y.Name && slices.Equal(x.Tensors, y.Tensors) }
	if !slices.EqualFunc(a.Layers, b.Layers, same) {
		i := 0
		for i < min(len(a.Layers), len(b.Layers)) && same(a.Layers[i], b.Layers[i]) {
			i++
		}
		return "layers", fmt.Sprintf("layer %d", i)
	}
	return "", ""
}

func describe(name string, x, y any, a, b control.Ready) string {
	if strings.HasSuffix(name, "_sha256") {
		if name == "program_sha256" {
			return ""
		}
		return otherFile(a, b)
	}
	if raw, ok := x.(interface{ MarshalJSON() ([]byte, error) }); ok {
		x, _ = raw.MarshalJSON()
		raw, _ = y.(interface{ MarshalJSON() ([]byte, error) })
		y, _ = raw.MarshalJSON()
	}
	text := func(v any) string {
		if b, ok := v.([]byte); ok {
			v = string(bytes.TrimSpace(b))
		}
		return OneLine(fmt.Sprintf("%v", v))
	}
	if tx, ty := text(x), text(y); len(tx)+len(ty) < 200 {
		return fmt.Sprintf("%s, not %s", ty, tx)
	}
	return ""
}

// otherFile names the first file that is not the same.
func otherFile(a, b control.Ready) string {
	for i := range max(len(a.Data), len(b.Data)) {
		switch {
		case i >= len(a.Data):
			return "file " + OneLine(b.Data[i].Path)
		case i >= len(b.Data) || a.Data[i] != b.Data[i]:
			return "file " + OneLine(a.Data[i].Path)
		}
	}
	return ""
}

func sameFloat(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }

func sameOptional(a, b *float64) bool {
	return (a == nil) == (b == nil) && (a == nil || sameFloat(*a, *b))
}

// otherStep says what of a step one worker reports otherwise than another, "" if nothing.
// Its plan may be another: a recovery comes before the end of a step for some, and after
// it for others.
func otherStep(a, b control.Step) string {
	switch {
	case !sameFloat(a.Loss, b.Loss):
		return "loss"
	case !sameFloat(a.GradNorm, b.GradNorm):
		return "grad_norm"
	case !sameFloat(a.LR, b.LR):
		return "lr"
	case a.Tokens != b.Tokens:
		return "tokens"
	case !sameOptional(a.ValLoss, b.ValLoss):
		return "val_loss"
	}
	return ""
}

// otherEnd is otherStep for the end of training. A worker that joined after the newest
// evaluation does not know of it, and one that is fresh, after the last step, does not know the
// loss.
func otherEnd(a, b control.Done, fresh bool) string {
	switch {
	case a.Steps != b.Steps:
		return "number of steps"
	case a.StoppedBy != b.StoppedBy:
		return "reason to stop"
	case !fresh && !sameFloat(a.Loss, b.Loss):
		return "loss"
	case a.ValLoss != nil && b.ValLoss != nil && !sameFloat(*a.ValLoss, *b.ValLoss):
		return "val_loss"
	case a.ParamsSHA256 != b.ParamsSHA256:
		return "params_sha256"
	case a.StateSHA256 != b.StateSHA256:
		return "state_sha256"
	}
	return ""
}

func finite(xs ...float64) bool {
	for _, x := range xs {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return false
		}
	}
	return true
}

// plural prints a count with its noun, such as "1 step" or "2 steps".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
