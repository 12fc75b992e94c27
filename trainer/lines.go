package trainer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// LineWriter writes a file of lines from [Job.OnStep], each exactly once, whatever
// happens to the run: workers that die, rollbacks, and resuming. The run
// records how long the file is with each call of OnStep that has returned. A process
// that makes the calls from then on cuts the file off there before it writes, so that
// nothing is left of a call that was interrupted. A new run begins with an empty file.
//
// The file must be the same one on all hosts of the run, and only the run may write to
// it. What a line says has to follow from the StepInfo, as it may be
// written again.
type LineWriter struct {
	// Path names the file. A relative path begins at the working directory.
	Path string

	// Header is the first line of the file, without its end; "" means none.
	Header string
}

// Printf appends a line, without its end, as [fmt.Sprintf] makes it. It is called in OnStep,
// with the StepInfo of that call. Its error ends the run even if OnStep does not
// return it.
func (w LineWriter) Printf(s StepInfo, format string, args ...any) error {
	if s.lines == nil {
		return errors.New("trainer: LineWriter.Printf outside of OnStep")
	}
	header := w.Header
	if header != "" {
		header = line(header)
	}
	return s.lines.Write(w.Path, header, line(fmt.Sprintf(format, args...)))
}

// line ends a text with one line end.
func line(text string) string { return strings.TrimSuffix(text, "\n") + "\n" }

// TensorBoard writes the numbers of each step to a file that TensorBoard shows: the loss, the learning rate, the norm of the gradient, the
// duration of the step, and metrics. It is called in [Job.OnStep], and has each step exactly once, as [LineWriter] has lines.
type TensorBoard struct {
	// Dir is the log directory of the run, which must exist: tensorboard --logdir shows it and those beside it. A relative path
	// begins at the working directory.
	Dir string
}

// eventsFile is the name of the file, which TensorBoard knows by a part of it. It is the same for all processes, since one continues
// what another began.
const eventsFile = "events.out.tfevents.0.soliton"

// Write writes a step, with the StepInfo of that call of OnStep. Its error ends the run even if OnStep does not return it.
func (b TensorBoard) Write(s StepInfo) error {
	if s.lines == nil {
		return errors.New("trainer: TensorBoard.Write outside of OnStep")
	}
	var values []byte
	value := func(tag string, x float64) { values = appendField(values, 1, appendScalar(nil, tag, x)) }
	value("loss/train", s.Loss)
	if s.ValLoss != nil {
		value("loss/val", *s.ValLoss)
	}
	value("lr", s.LR)
	value("grad_norm", s.GradNorm)
	value("step_seconds", s.Duration.Seconds())
	for of, metrics := range [...]map[string]float64{s.TrainMetrics, s.Metrics} {
		for _, name := range slices.Sorted(maps.Keys(metrics)) {
			value(name+[...]string{"/train", "/val"}[of], metrics[name])
		}
	}
	event := binary.AppendUvarint(append(appendTime(nil, s.time), 2<<3), uint64(s.Step)) // Event.step
	event = appendField(event, 5, values)                                                // Event.summary
	header := appendField(appendTime(nil, s.time), 3, []byte("brain.Event:2"))           // Event.file_version
	return s.lines.Write(filepath.Join(b.Dir, eventsFile), string(appendRecord(nil, header)), string(appendRecord(nil, event)))
}

// appendTime appends Event.wall_time, seconds since 1970.
func appendTime(b []byte, t time.Time) []byte {
	return binary.LittleEndian.AppendUint64(append(b, 1<<3|1), math.Float64bits(float64(t.UnixMicro())/1e6))
}

// appendScalar appends a Summary.Value: its tag and its simple_value.
func appendScalar(b []byte, tag string, x float64) []byte {
	return binary.LittleEndian.AppendUint32(append(appendField(b, 1, []byte(tag)), 2<<3|5), math.Float32bits(float32(x)))
}

// appendField appends a field of a protocol buffer that has a length.
func appendField(b []byte, number byte, content []byte) []byte {
	return append(binary.AppendUvarint(append(b, number<<3|2), uint64(len(content))), content...)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendRecord appends a record of a TFRecord file: its length and its content, a checksum behind each.
func appendRecord(b, content []byte) []byte {
	masked := func(b []byte) uint32 {
		sum := crc32.Checksum(b, castagnoli)
		return (sum>>15 | sum<<17) + 0xa282ead8
	}
	length := binary.LittleEndian.AppendUint64(nil, uint64(len(content)))
	b = binary.LittleEndian.AppendUint32(append(b, length...), masked(length))
	return binary.LittleEndian.AppendUint32(append(b, content...), masked(content))
}
