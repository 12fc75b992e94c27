// Package trainer describes training jobs and runs them. Training programs import
// it.
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
// [Main] adds the standard flags, keeps a run directory and shows progress.
// When the launcher starts the program, it becomes a worker. [Run] trains a
// [Job] inside any other program.
//
// # Models
//
// A [Model] is a stack of [Layer] values and a [Loss]. Layers are pure
// functions with explicit derivatives. Package kernel has the operations that the
// layers of package nn are made of, so your own layers can be as fast. [Open]
// loads a trained model for inference.
//
// # Data
//
// A [Dataset] gives its samples by index. Sample i of a run is the sample at
// position i mod n of data epoch i / n, where n is the number of samples. Each
// epoch has its own order, which follows from the seed. A global batch may lie in
// two epochs. [Sample] has a random stream for augmentation. [Text] makes data for
// language models from files.
//
// # The same bits
//
// The loss curve and the parameters depend, to the last bit, on the job and on
// nothing else; see [Job]. Your own layers, losses and data keep this as long as
// they follow the rules of [Layer] and [Dataset].
//
// # Concurrency
//
// Forward and Backward of layers, the loss and metrics run in as many goroutines as the worker has threads, up to 8, each with a
// micro-batch of its own, and run parts of a call on the threads of [Context.For]. A [Dataset] is asked by one goroutine
// at a time, unless it is [Concurrent]. All other user code of one job runs in one goroutine. Jobs may run
// side by side in one process.
//
// # Stopping and failing
//
// A run that is stopped, by Ctrl-C or the end of Run's context, finishes its
// step and writes its files. A panic in user code ends the run with a
// [*PanicError]. A loss or gradient that is not finite ends it with a
// [*NonFiniteError] before the step is committed.
package trainer
