// Package trainer is what a training program imports: it describes a job and
// runs it.
//
// # A program
//
//	func main() {
//		trainer.Main(func(f *flag.FlagSet) func() (trainer.Job, error) {
//			layers := f.Int("layers", 4, "transformer blocks")
//			return func() (trainer.Job, error) {
//				text, err := trainer.Text("corpus/*.txt")
//				return trainer.Job{
//					Model: nn.GPT(nn.GPTConfig{Layers: *layers, Width: 256, Heads: 8, Context: 128}),
//					Data:  text, Optimizer: trainer.AdamW{LR: trainer.Cosine(1e-3, 20)},
//					GlobalBatch: 32, MicroBatch: 2, Steps: 200, ClipNorm: 1, Seed: 1,
//				}, err
//			}
//		})
//	}
//
// [Main] adds the standard flags, keeps a run directory, shows progress and
// turns into a worker when the launcher starts the program. [Run] trains a
// [Job] inside of any other program.
//
// # Models
//
// A [Model] is a stack of [Layer] values and a [Loss]. Layers are pure
// functions with explicit derivatives; those of package nn and one's own are
// equals. [Open] loads a trained model for inference.
//
// # Data
//
// A [Dataset] gives its samples by index. Sample i of a run is the sample at
// position i mod n of data epoch i / n, where n is the number of samples and
// every epoch has an order of its own that follows from the seed. A global
// batch may lie in two epochs. [Text] makes data for language models from
// files.
//
// # The same bits
//
// The loss curve and the parameters depend, to the last bit, on the job and on
// nothing else; see [Job]. This is as true of one's own layers, losses and
// data as they keep to the rules of [Layer].
//
// # Concurrency
//
// User code of one job runs in one goroutine, except for what layers run on
// the threads of [Context.For]. Jobs may run side by side in one process.
//
// # Stopping and failing
//
// A run that is asked to stop, by Ctrl-C or the end of Run's context,
// finishes its step and writes its files. A panic in user code ends the run with a
// [*PanicError]. A loss or gradient that is not finite ends it with a
// [*NonFiniteError] before the step is committed.
package trainer
